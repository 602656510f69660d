"""Files of sentence-transformers: chains of modules after a transformer, and scores of sequence pairs.

Never here: the modules themselves, which are in `weft.frontends.dsl.outputs`.
"""
