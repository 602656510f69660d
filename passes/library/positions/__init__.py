"""Passes that change how a model encodes positions."""
