"""Triton kernels for operations that PyTorch runs slowly; a file has a kernel, its launcher and a torch version.

The folder is copied into the folder of a generated model, so its files import nothing but torch, Triton and each other.
Never here: imports of weft, kernels for operations that torch runs as fast (large GEMMs, dense causal attention).
"""
