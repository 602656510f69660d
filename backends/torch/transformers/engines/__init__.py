"""Engines and several devices: plans of parallelism, and which engines can run a model.

Never here: text of classes.
"""
