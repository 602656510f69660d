"""Training of generated modules: batches, parameter groups, objectives, steps and checkpoints.

Never here: files and output of a run (`weft.frontends.app.api.training`); students and teachers
(`backends.torch.distillation`).
"""
