"""The model of the server: a thread that decodes or encodes waiting requests, prompts, constraints, counters.

Never here: HTTP, the form of requests and responses.
"""
