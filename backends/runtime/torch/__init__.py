"""The PyTorch executor: decoders of generated modules, their caches, CUDA graphs.

Never here: generated code, kernels, sampling on the host.
"""
