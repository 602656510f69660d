"""Tables: buffers that are no weights, and keep their own dtype."""

from __future__ import annotations

from torch import Tensor, nn


def restore(module: nn.Module, tables: dict[str, Tensor]) -> None:
    """Give the buffers of `module`, by their names, the numbers of `tables` again, wherever they have moved to."""
    for name, buffer in list(module.named_buffers()):
        owner, _, last = name.rpartition(".")
        if buffer.dtype != tables[name].dtype:
            setattr(module.get_submodule(owner), last, tables[name].to(buffer.device))
