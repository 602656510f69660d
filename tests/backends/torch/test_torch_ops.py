"""Every example case of every op as a generated module, in every dtype, against its reference in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.backends.torch.module import build_module
from weft.ir import OPS, dtypes
from weft.ir import ops as _all  # noqa: F401 - fills OPS
from weft.ir.cases import one_node
from weft.ir.op import Case, Op

from .generated import errors, tensors

DTYPES = {torch.float32: dtypes.f32, torch.bfloat16: dtypes.bf16, torch.float16: dtypes.f16}
WEIGHTS = ("weight", "bias", "table", "up", "down", "gate", "key_table", "value_table", "slopes")
ROUNDINGS = 8  # to the dtype, from operands to result: those of attention, one after the other
TERMS = 150  # tokens of the longest case


def _examples() -> list[object]:
    return [
        pytest.param(op, example, dtype, id=f"{op.name}-{i}-{str(dtype)[6:]}")
        for op in OPS.values()
        for i, example in enumerate(op.cases)
        for dtype in DTYPES
    ]


@pytest.mark.parametrize("as_weights", [False, True], ids=["inputs", "weights"])
@pytest.mark.parametrize(("op", "example", "dtype"), _examples())
def test_every_case_of_every_op(op: Op, example: Case, dtype: torch.dtype, as_weights: bool) -> None:
    weights = [o.name for o in op.operands if o.name in WEIGHTS] if as_weights else []
    if as_weights and not weights:
        return
    graph, feeds = one_node(op, example, dtype=DTYPES[dtype], weights=weights)
    given = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors(feeds, torch.float64).items()}
    module = build_module(graph, dtype=dtype)
    held = module.state_dict()
    operands, counts = [], {}
    for i, array in enumerate(example.draw()):
        operand = op.operands[min(i, len(op.operands) - 1)]
        key = f"{operand.name}{i}" if operand.variadic else operand.name
        counts[key] = i
        tensor = given.get(key, held.get(key))
        exact = None if tensor is None else (tensor.double() if tensor.is_floating_point() else tensor).numpy()
        operands.append(None if array is None else exact)
    wanted = op.reference(*operands, **example.attrs)
    made = module(**given)
    for got, want in zip(
        made if isinstance(made, tuple) else (made,), wanted if isinstance(wanted, tuple) else (wanted,), strict=True
    ):
        finite = np.isfinite(np.asarray(want, np.float64)) if got.is_floating_point() else np.ones(want.shape, bool)
        np.testing.assert_array_equal(np.where(finite, 0, got.detach().double()), np.where(finite, 0, want))
        off = errors(torch.where(torch.from_numpy(finite), got.detach(), 0), np.where(finite, want, 0))
        inner = torch.finfo(torch.float32).eps
        bound = 0.5 * ROUNDINGS * torch.finfo(dtype).eps + 8 * inner * TERMS**0.5 if got.is_floating_point() else 0
        assert float(off.max(initial=0)) <= bound, f"{off.max():.2e} is more than {bound:.2e}"
