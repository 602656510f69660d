"""Training of generated modules: batches, parameter groups, objectives, steps and checkpoints.

Never here: what a run writes and prints (`weft.frontends.app.api.training`); students and teachers
(`backends.torch.distillation`).
"""
