"""The files of a model for transformers: classes, configuration, plans for several devices.

Never here: the computation of an op.
"""
