"""The network that a picture shows: operations, scopes, facts and labels.

Never here: pixels, formats.
"""
