"""PyTorch as a target: readable source for one architecture, the kernels it uses, and the same module in process.

`parts` holds functions whose source is copied into generated models, `kernels` the Triton kernels beside them.
Never here: model families, checkpoint formats, rewrites of graphs.
"""
