"""Export: a graph, rewritten or not, as a checkpoint that others load.

The family of a graph is found by comparison: the settings are inferred from the graph (`infer_settings`), the family's
own table builds the graph of that config, and the two are matched value by value (`matching`). The names and layouts
of the family's tensors are its recipes inverted (`inversion`). Never here: readers of checkpoints, the ONNX backend.
"""
