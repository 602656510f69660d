"""Lowerings of ops to Python text, by theme; importing the package registers them all."""

from . import attention, dense, elementwise, tensors  # noqa: F401 - these register lowerings
