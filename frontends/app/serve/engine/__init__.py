"""The model behind the server: a thread that decodes or encodes what waits, prompts, constraints, counters.

Never here: HTTP, the form of requests and responses.
"""
