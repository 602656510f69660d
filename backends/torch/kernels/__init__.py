"""Triton kernels for operations that PyTorch alone runs slowly: each file has a kernel, its launcher and a torch
version.

The folder is copied into the folder of a generated model, so its files import nothing but torch, Triton and each other.
Never here: imports of weft, kernels for operations that torch runs as fast (GEMMs of many rows, dense causal
attention).
"""
