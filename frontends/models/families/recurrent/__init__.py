"""Decoders with states of constant size: state spaces, linear attention, delta rules, and hybrids of these.

Never here: families that attend only.
"""
