"""User-defined recurrences become a Scan whose body is the step, or are refused with the op that ONNX lacks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from weft.backends.onnx.lowering import LOWERINGS, list_refusals
from weft.backends.target import TARGETS
from weft.ir import Value, ops
from weft.ir.ops.loops import build_step

from ..lowered import Builder, op_types, run


def decay(states: Sequence[Value], tokens: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """Compute h ← W h / 2 + x and y = 3 h."""
    (h,), (x, weight) = states, tokens
    new = ops.add(ops.affine(ops.linear(h, weight), by=0.5), x)
    return [new], [ops.affine(new, by=3.0)]


STEP = build_step(decay, {"h": (4, 2.0)}, {"x": (4,)}, weight=(4, 4))


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
@pytest.mark.parametrize("continued", [False, True])
def test_recurrence_is_one_scan(target: str, continued: bool, rng: np.random.Generator) -> None:
    build, x, w, h = Builder(), *(rng.standard_normal(shape) for shape in ((2, 5, 4), (4, 4), (2, 4)))
    values = [build.input("x", x), build.weight("w", w), *([build.input("past", h)] if continued else [])]
    outputs = ops.scan(*values, step=STEP)
    named = dict(zip(("y", "present"), outputs, strict=False)) if isinstance(outputs, tuple) else {"y": outputs}
    built = build.build(target, **named)
    assert op_types(built).count("Scan") == 1
    # The weight is a parameter in the step too, so it is stored in the layout of its product.
    assert [weight.value.name for weight in built.weights] == ["weight.T" if target == "onnx" else "weight"]
    state, rows = h if continued else np.full((2, 4), 2.0), []
    for t in range(5):
        state = 0.5 * state @ w.T + x[:, t]
        rows.append(3 * state)
    found = run(built, build.feeds)
    np.testing.assert_allclose(found["y"], np.stack(rows, 1), rtol=1e-4, atol=1e-5)
    if continued:
        np.testing.assert_allclose(found["present"], state, rtol=1e-4, atol=1e-5)


def test_step_that_a_target_cannot_run_is_refused_by_its_op() -> None:
    build = Builder()
    ops.scan(build.input("x", np.zeros((1, 2, 4))), build.weight("w", np.zeros((4, 4))), step=STEP)
    (node,) = build.graph.nodes
    assert list_refusals(node, TARGETS["onnx"]) is None
    saved = LOWERINGS["affine"]
    LOWERINGS.remove("affine")
    try:
        (reason,) = list_refusals(node, TARGETS["onnx"]) or []
    finally:
        LOWERINGS.add("affine", saved)
    assert reason.startswith("StepScan: in its step op affine at %y.affine cannot be lowered and has no simpler form")
