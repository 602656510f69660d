"""Decoders with mixtures of experts, and decoders with latent attention.

Never here: decoders with other feed-forwards only; states.
"""
