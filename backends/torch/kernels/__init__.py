"""Triton kernels for what torch alone does slowly: one per file, with its launcher and what it computes in plain torch.

The folder is copied beside a generated model, so its files import nothing but torch, Triton and each other.
Never here: anything of weft, kernels for what torch does as well (dense products of many rows, dense causal attention).
"""
