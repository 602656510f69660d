"""Distillation of a quantized model: a module whose scales train, the training, and texts that a model samples.

Never here: which parameters a graph has for it and what becomes of them (`weft.frontends.app.api.healing` asks and
returns models); kernels that multiply by codes (`..kernels`).
"""
