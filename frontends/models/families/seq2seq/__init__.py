"""Encoder-decoders, and decoders built from the same blocks.

Never here: decoders with other blocks.
"""
