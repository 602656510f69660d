"""Passes that make a model observable: values inside it become outputs, and inputs scale its parts."""
