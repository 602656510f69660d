"""Prompts of many tokens: Triton kernels for what stands beside the products, which libraries compute.

Never here: products of few rows, which read weights as they are stored.
"""
