"""Lowerings of a decode step: calls of kernels for fused ops, by theme; importing a module registers its own.

Never here: kernels themselves, other than the text of those that are generated for recurrences of one's own
(`scan_kernel`).
"""
