"""Alignment of two models: corresponding layers, and corresponding values inside them.

Never here: how a model runs, pictures.
"""
