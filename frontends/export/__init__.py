"""Export: a graph, rewritten or not, as a checkpoint that other tools load.

The family of a graph is found by comparison: settings are inferred from the graph (`infer_settings`), the family's own
table builds the graph of their config, and the two graphs are matched value by value (`matching`). The inverted recipes
of the family's tensors (`inversion`) give their names and layouts. Never here: readers of checkpoints, the ONNX
backend.
"""
