"""Lowerings of ops to Python text, by theme; importing the package registers them all."""

from . import attention, dense, distances, elementwise, mixtures, recurrent, tensors  # noqa: F401 - they register
