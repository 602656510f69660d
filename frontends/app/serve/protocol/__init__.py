"""The protocol of OpenAI's API: models of its requests, responses and errors, tool calls.

Never here: the model, HTTP connections.
"""
