"""Inference on several devices: plans of parallelism, and a list of the engines that can run a model.

Never here: source of classes.
"""
