"""Device functions and launch helpers that several kernels share.

Never here: a kernel with its own launcher.
"""
