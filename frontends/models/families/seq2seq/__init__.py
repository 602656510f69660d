"""Encoder-decoders, and decoders that are made of the same blocks.

Never here: decoders that share nothing with them.
"""
