"""Matrix products on a CPU: calls of PyTorch operators that read packed weights.

Never here: Triton kernels, or anything that a GPU runs.
"""
