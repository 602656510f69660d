"""Concatenation of the weights of linear layers, which stay views of the result."""

from __future__ import annotations

import torch
from torch import nn

from weft.backends.torch.lib.packing import pack, pack_bias, pack_blocks
from weft.backends.torch.lib.quantized import QuantizedLinear


def test_pack_concatenates_weights_that_modules_then_view() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 4)
    wanted = torch.cat([first.weight, second.weight]).detach().clone()
    weight = pack(first, second)
    assert torch.equal(weight, wanted)
    with torch.no_grad():
        second.weight.fill_(7)
    assert torch.equal(weight[2:], torch.full((4, 3), 7.0))
    assert torch.equal(pack_bias(first, second), torch.cat([first.bias, second.bias]))


def test_pack_blocks_concatenates_codes_and_scales() -> None:
    modules = [QuantizedLinear(32, n, bits=4, group=32, offsets=True) for n in (2, 3)]
    for number, module in enumerate(modules):
        module.codes.fill_(number + 1)
        module.scales.fill_(number + 0.5)
        assert module.offsets is not None
        module.offsets.fill_(-number)
    weight = pack_blocks(*modules)
    assert weight.shape == (5, 32)
    assert weight.packed[:, 0].tolist() == [1, 1, 2, 2, 2]
    assert weight.scales.tolist() == [[0.5, 0.5, 1.5, 1.5, 1.5]]
    assert weight.offsets is not None
    assert weight.offsets.tolist() == [[0, 0, -1, -1, -1]]
    modules[1].codes.fill_(9)
    assert weight.packed[:, 0].tolist() == [1, 1, 9, 9, 9]
