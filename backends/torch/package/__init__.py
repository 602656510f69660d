"""A folder of readable PyTorch with the generated model and its scripts, or the same model in process.

Never here: lowerings, kernels.
"""
