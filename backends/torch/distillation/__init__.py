"""Distillation: a student with chosen trainable parameters, its losses against a teacher, and sampled sequences.

Never here: loading models and saving results (`weft.frontends.app.api.training`); kernels that multiply by codes
(`backends.torch.kernels`).
"""
