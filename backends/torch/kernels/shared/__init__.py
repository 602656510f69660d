"""Device functions and launch plumbing that several kernels share.

Never here: a kernel with a launcher of its own.
"""
