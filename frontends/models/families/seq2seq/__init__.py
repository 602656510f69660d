"""Encoder-decoders, and decoders built from the same blocks.

Never here: decoders that share nothing with them.
"""
