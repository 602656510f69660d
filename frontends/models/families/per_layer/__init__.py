"""Decoders with embeddings for every layer and shared keys and values: Gemma 3n, Gemma 4.

Never here: modules, which are in the DSL.
"""
