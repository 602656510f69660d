"""Parts of a decode step that a kernel computes at once: products, attention, latents, mixtures, recurrences.

Never here: which nodes a kernel takes (`patterns`), kernels themselves.
"""
