"""Weights fitted to a text: calibration, moments of activations, merged heads.

Never here: passes (`library` calls this), training.
"""
