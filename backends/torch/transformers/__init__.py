"""Transformers as a target: a folder with custom code that transformers, and engines that use it, can load.

Never here: the computation of an op (target `torch` has that), families of models.
"""
