"""Distillation: a student with chosen trainable parameters, and its losses against a teacher.

Never here: loading models and saving results (`weft.frontends.app.api.training`); kernels that multiply by codes
(`backends.torch.kernels`).
"""
