"""Passes that make a model observable: values inside it become outputs, and inputs scale its parts.

Never here: runs of a model, and the tools that read these outputs (weft.frontends).
"""
