"""Passes that store numbers in fewer bits: weights in quantized blocks."""
