"""Passes that adapt a graph to a target: lengths, dtypes and outputs; encoder and decoder as graphs of their own."""
