"""Weights fitted to a calibration text: activations and their moments, merged heads, quantized blocks.

Never here: passes (`library` calls this), training.
"""
