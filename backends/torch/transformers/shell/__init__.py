"""The files of a model for transformers: classes, configuration, plans for several devices.

Never here: what an op computes.
"""
