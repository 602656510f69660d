"""Triton kernels for what stands beside the products of a prompt, which libraries compute.

Never here: products of few rows, which read weights as they are stored.
"""
