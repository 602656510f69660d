"""The executor on PyTorch: modules that decode, their caches, CUDA graphs.

Never here: generated code, kernels, sampling on the host.
"""
