"""Parts of a decode step that a kernel computes at once: products, attention, latents, mixtures, recurrences.

Never here: which nodes a kernel takes (`patterns`), kernels themselves, other than the text of those that are
generated for recurrences of one's own (`scan_kernel`).
"""
