"""Passes that store weights in fewer bits, as quantized blocks."""
