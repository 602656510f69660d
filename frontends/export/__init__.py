"""Export: a graph, rewritten or not, as a checkpoint that others load.

Never here: readers of such checkpoints, ONNX (`backends.onnx`).
"""
