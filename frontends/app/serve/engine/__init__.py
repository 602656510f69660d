"""The engine of the server: prompts, constraints, counters, and the thread that runs the model for waiting requests.

Never here: HTTP, the form of requests and responses.
"""
