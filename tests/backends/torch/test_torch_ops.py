"""Every example case of every op as a generated module, against its reference in float64: in every dtype, of which
`make test` takes one for each case, by turns."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weft.ir import OPS
from weft.ir import ops as _all  # noqa: F401 - fills OPS
from weft.ir.testing import build_node_graph

from ...lowered import build_module
from ...sampling import each
from .generated import errors, tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = {"weight", "bias", "table", "up", "down", "gate", "key_table", "value_table", "slopes"}
ROUNDINGS = 8  # to the dtype, from operands to result: those of attention, one after the other
TERMS = 150  # tokens of the longest case


def _examples() -> list[object]:
    found = []
    for op in OPS.values():
        as_weights = [False, True] if WEIGHTS.intersection(o.name for o in op.operands) else [False]
        found += [
            pytest.param(
                op.name, i, held, dtype, id=f"{op.name}-{i}-{'weights' if held else 'inputs'}-{str(dtype)[6:]}"
            )
            for i in range(len(op.cases))
            for held in as_weights
            for dtype in each(3, DTYPES, (i + held) % 3)
        ]
    return found


@functools.cache
def _built(name: str, number: int, held: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The module of an example in float32, and its inputs in float64."""
    weights = WEIGHTS if held else ()
    graph, feeds = build_node_graph(OPS[name], OPS[name].cases[number], weights=weights)
    return build_module(graph), feeds


@pytest.mark.parametrize(("name", "number", "held", "dtype"), _examples())
def test_every_case_of_every_op(name: str, number: int, held: bool, dtype: torch.dtype) -> None:
    op, example = OPS[name], OPS[name].cases[number]
    module, feeds = _built(name, number, held)
    module = copy.deepcopy(module).to(dtype).eval()
    given = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors(feeds, torch.float64).items()}
    known, operands = {**module.state_dict(), **given}, []
    for i, array in enumerate(example.draw()):
        operand = op.operands[min(i, len(op.operands) - 1)]
        tensor = None if array is None else known[f"{operand.name}{i}" if operand.variadic else operand.name]
        exact = None if tensor is None else tensor.double() if tensor.is_floating_point() else tensor
        operands.append(None if exact is None else exact.numpy())
    wanted, made = op.reference(*operands, **example.attrs), module(**given)
    wanted, made = (x if isinstance(x, tuple) else (x,) for x in (wanted, made))
    narrow, inner = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    for got, want in zip(made, map(np.asarray, wanted), strict=True):
        finite = np.asarray(np.isfinite(want.astype(np.float64)))
        np.testing.assert_array_equal(np.where(finite, 0, got.detach().double()), np.where(finite, 0, want))
        off = errors(torch.where(torch.from_numpy(finite), got.detach(), 0), np.where(finite, want, 0))
        bound = 0.5 * ROUNDINGS * narrow + 8 * inner * TERMS**0.5 if got.is_floating_point() else 0
        assert float(off.max(initial=0)) <= bound, f"{off.max():.2e} is more than {bound:.2e}"
