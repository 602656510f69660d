"""Transformers as a target: a folder with a model's own code that transformers loads, and what builds upon it.

Never here: what an op computes (`torch` beside it has that), families of models.
"""
