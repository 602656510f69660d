"""Decoders with mixtures of experts, and those with latent attention.

Never here: feed-forwards of another kind in the dense layers of a family; states.
"""
