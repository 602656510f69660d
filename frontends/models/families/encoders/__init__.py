"""Encoders of token sequences and of images.

Never here: modules that read an encoder's output.
"""
