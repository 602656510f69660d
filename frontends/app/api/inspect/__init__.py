"""Inspection: parameters, FLOPs, cache bytes, sizes.

Never here: printing to a terminal.
"""
