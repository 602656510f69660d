"""Triton kernels for prompts of many tokens (prefill): the operations around the GEMMs, which libraries compute.

Never here: products of few rows, which read weights as they are stored.
"""
