"""Passes by which a target fits a graph to what it runs: lengths, dtypes and outputs, the two parts of a model."""
