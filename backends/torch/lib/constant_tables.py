"""Constant tables: buffers that keep their dtype when a model is cast."""

from __future__ import annotations

from torch import Tensor, nn


def restore(module: nn.Module, tables: dict[str, Tensor]) -> None:
    """Restore the values and dtypes of the buffers of `module` from `tables`, by name, on the buffers' devices. Only
    buffers whose dtype has changed are replaced."""
    for name, buffer in list(module.named_buffers()):
        owner, _, last = name.rpartition(".")
        if buffer.dtype != tables[name].dtype:
            setattr(module.get_submodule(owner), last, tables[name].to(buffer.device))
