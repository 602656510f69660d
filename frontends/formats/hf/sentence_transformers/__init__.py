"""Files of sentence-transformers: chains of modules behind a transformer, and scores of pairs of texts.

Never here: the modules themselves, which are `weft.frontends.dsl.outputs`.
"""
