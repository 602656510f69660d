"""Passes that adapt a graph to a target: lengths, dtypes and outputs, the two sides of a model."""
