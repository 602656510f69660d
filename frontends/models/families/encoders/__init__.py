"""Encoders of texts and of images.

Never here: what reads an encoder's output.
"""
