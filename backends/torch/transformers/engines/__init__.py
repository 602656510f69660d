"""Inference engines and several devices: plans of parallelism, and the engines that can run a model.

Never here: source of classes.
"""
