"""Lowerings of ops to Python text, by theme; importing the package registers them all."""

from . import (  # noqa: F401 - they register
    attention,
    blocks,
    dense,
    distances,
    elementwise,
    mixtures,
    recurrent,
    tensors,
)
