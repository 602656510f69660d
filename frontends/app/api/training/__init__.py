"""Training of models: corpora as tokens, run folders, `weft.train`, `weft.compare`, `weft.distil`.

Never here: steps of an optimizer (`weft.backends.torch.training`).
"""
