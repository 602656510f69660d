"""Readers of sentence-transformers' files: the modules after a transformer, and rerankers.

Never here: the modules themselves, which are in `weft.frontends.dsl.outputs`.
"""
