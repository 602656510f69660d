"""Constant tables keep their values when a model is cast."""

from __future__ import annotations

import torch
from torch import nn

from weft.backends.torch.lib.constant_tables import restore


def test_restore_undoes_a_cast_of_nested_buffers() -> None:
    layer = nn.Module()
    layer.register_buffer("angles", torch.tensor([1 / 3, 1e-30]))
    layer.register_buffer("index", torch.tensor([7]))
    model = nn.ModuleDict({"layer": layer})
    tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(torch.float16)
    layer.index.fill_(8)
    assert layer.angles.dtype == torch.float16
    restore(model, tables)
    assert torch.equal(layer.angles, torch.tensor([1 / 3, 1e-30]))
    assert layer.index.tolist() == [8]  # its dtype is unchanged: the buffer is not replaced
