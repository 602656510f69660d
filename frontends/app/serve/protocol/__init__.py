"""The protocol of OpenAI's API: requests as they are checked, responses and errors as they are written, tool calls.

Never here: the model, HTTP connections.
"""
