"""Distillation of a quantized model: a student with trainable scales, the training loop, and sampled sequences.

Never here: loading models and saving results (`weft.frontends.app.api.heal`); kernels that multiply by codes
(`backends.torch.kernels`).
"""
