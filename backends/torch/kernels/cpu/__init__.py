"""Products on a CPU by operators of PyTorch that read packed weights.

Never here: Triton kernels, or anything that a GPU runs.
"""
