"""Package a generated model: as a folder of readable PyTorch with scripts, or as a module in this process.

Never here: lowerings, kernels.
"""
