"""A folder of readable PyTorch: the generated model, the scripts beside it; the same in process.

Never here: lowerings, kernels.
"""
