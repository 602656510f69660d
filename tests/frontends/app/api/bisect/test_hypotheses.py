"""Hypotheses: changes that explain a difference are found by running operations again."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from weft.backends.alignment.traces import Operation, ValueTrace
from weft.frontends.app.api.bisect.hypotheses import Region, TrialChange, list_roundings, name_factor, permute_heads
from weft.ir import ops

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 1, 6, 16))
W, V = RNG.normal(size=(2, 16, 16))
BIAS = RNG.normal(size=16)
AT = np.arange(6)[None]
ATTENTION: dict[str, Any] = {"heads": 4, "kv_heads": 4, "causal": True}
F = 1e4 ** -(np.arange(2) / 2)


def node(op: Any, name: str, *reads: str, **attrs: Any) -> Operation:
    full = {key: attr.default for key, attr in op.attrs.items()} | attrs
    return Operation(
        op.name, name, reads, (name,), full, lambda operands, attrs: [op.run_reference(operands, attrs)[0]]
    )


def explain(expected: np.ndarray, *nodes: Operation, attrs: tuple[float, ...] = ()) -> TrialChange | None:
    """Return the explanation of `expected` for the result of the last of `nodes`."""
    arrays = {"w": W, "v": V, "bias": BIAS, "f": F}
    trace = ValueTrace([*nodes], {"x": X, "y": Y, "at": AT}, {n: (w.shape, lambda w=w: w) for n, w in arrays.items()})
    for operation in nodes:
        trace.values[operation.name] = operation.run([trace.load(x) for x in operation.reads], operation.attrs)[0]
    region = Region(trace, nodes, nodes[-1].name, expected)
    elsewhere = Operation("op", "op", (), (), dict(enumerate(attrs)), lambda operands, attrs: [])
    return region.find_cause(1e-9, time.monotonic() + 60, Region(trace, [elsewhere], "x", X))


def attend(x: np.ndarray = X, y: np.ndarray = Y, **attrs: Any) -> np.ndarray:
    return np.asarray(ops.attention.reference(x, y, x, **{**ATTENTION, **attrs}))


def rotate(at: np.ndarray = AT, frequencies: np.ndarray = F, **attrs: Any) -> np.ndarray:
    return np.asarray(ops.rope.reference(X, at, frequencies, heads=4, **attrs))


NORM, LINEAR = node(ops.rms_norm, "n", "x", "bias"), node(ops.linear, "l", "x", "w", "bias")
ATTEND = node(ops.attention, "a", "x", "y", "x", **ATTENTION)
GELU = node(ops.gelu, "g", "x")
ROPE = node(ops.rope, "r", "x", "at", "f", heads=4)
ADD_NORM = node(ops.add_norm, "s", "x", "y")


def linear(w: np.ndarray, x: np.ndarray = X) -> np.ndarray:
    return x @ w.T + BIAS


PERMUTED = attend().reshape(1, 6, 4, 4)[:, :, [2, 0, 1, 3]].reshape(X.shape)
NORMED = linear(W) / np.abs(linear(W)).mean(-1, keepdims=True) * np.linspace(1, 2, 16)
CASES: list[tuple[str, str, np.ndarray, tuple[Operation, ...]]] = [
    ("eps", "eps is 0.001 instead", X / np.sqrt(np.square(X).mean(-1, keepdims=True) + 1e-3) * BIAS, (NORM,)),
    ("offset of 1", "bias is changed by +1", np.asarray(ops.rms_norm.reference(X, BIAS + 1)), (NORM,)),
    ("scale", "scale is 0.25 instead of None", attend(scale=0.25), (ATTEND,)),
    ("causal", "causal is False", attend(causal=False), (ATTEND,)),
    ("window", "window is 3 instead of None", attend(window=3), (ATTEND,)),
    ("softcap", "softcap is", attend(softcap=4.0), (ATTEND,)),
    ("exchanged operands", "x and y are exchanged", attend(Y, X), (ATTEND,)),
    ("transposed", "w is transposed", linear(W.T), (LINEAR,)),
    ("rounding", "rounded to f16", linear(W.astype(np.float16).astype(float)), (LINEAR,)),
    ("other weight", "w is v instead", linear(V), (LINEAR,)),
    ("missing bias", "bias is 0", X @ W.T, (LINEAR,)),
    ("sign", "x is negated", linear(-W), (LINEAR,)),
    ("other operand", "it reads y2 instead of x", linear(W, Y * Y), (node(ops.square, "y2", "y"), LINEAR)),
    ("missing operand", "y is 0", np.asarray(ops.rms_norm.reference(X)), (ADD_NORM,)),
    ("missing operation", "n is left out", linear(W), (NORM, node(ops.linear, "l", "n", "w", "bias"))),
    ("interleaved", "interleaved is True", rotate(interleaved=True), (ROPE,)),
    ("offset", "at is shifted by +1", rotate(AT + 1), (ROPE,)),
    ("theta", "base 500000", rotate(AT, 5e5 ** -(np.arange(2) / 2)), (ROPE,)),
    ("rope scaling", "times 0.25", rotate(AT, F / 4), (ROPE,)),
    ("factor", "a is multiplied by 0.5 = 1/√4", attend() / 2, (ATTEND,)),
    ("bias", "one vector is added to all", linear(W) + np.arange(16), (LINEAR,)),
    ("permuted heads", "a has heads [2, 0, 1, 3]", PERMUTED, (ATTEND,)),
    ("norm", "by its own factor", NORMED, (LINEAR,)),
    ("approximate", "tanh instead of none", np.asarray(ops.gelu.reference(X, approximate="tanh")), (GELU,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "expected", "nodes"), CASES, ids=[f"{kind}-{i}" for i, (kind, *_) in enumerate(CASES)]
)
def test_changes_are_found(kind: str, text: str, expected: np.ndarray, nodes: tuple[Operation, ...]) -> None:
    found = explain(expected, *nodes, attrs=(4.0,))
    assert found is not None and found.kind == kind and text in found.text and found.error < 1e-12


def test_the_operation_left_out_is_at_fault() -> None:
    found = explain(linear(W), NORM, node(ops.linear, "l", "n", "w", "bias"))
    assert found is not None and found.operation is NORM


def test_permuted_heads_of_a_weight_are_found_after_attention() -> None:
    order = W.reshape(4, 4, 16)[[1, 0, 3, 2]].reshape(16, 16)
    want = np.asarray(ops.attention.reference(X, X @ order.T, X, **ATTENTION))
    found = explain(want, node(ops.linear, "l", "x", "w"), node(ops.attention, "a", "x", "l", "x", **ATTENTION))
    assert found is not None and (found.kind, found.operation.name) == ("permuted heads", "l")


def test_scaled_rows_of_a_weight_are_no_norm() -> None:
    found = explain((X @ W.T) * np.where(np.arange(16) == 7, 1.5, 1.0), node(ops.linear, "l", "x", "w"))
    assert found is None or found.kind != "norm"


def test_random_values_have_no_explanation() -> None:
    assert explain(RNG.normal(size=X.shape), LINEAR) is None


def test_the_deadline_ends_the_search() -> None:
    trace = ValueTrace([LINEAR], {"x": X, "l": X}, {n: (w.shape, lambda w=w: w) for n, w in (("w", W), ("bias", BIAS))})
    calls: list[TrialChange] = []

    class Counting(Region):
        def compute_error(self, change: TrialChange) -> float:
            calls.append(change)
            return math.inf

    region = Counting(trace, [LINEAR], "l", X)
    assert region.find_cause(1e-9, time.monotonic() - 1, region) is None
    assert len(calls) == 1


def test_operations_that_refuse_a_change_explain_nothing() -> None:
    def refuse(operands: Any, attrs: Any) -> Any:
        raise ValueError("no")

    trace = ValueTrace([], {"x": X, "y": X})
    operation = Operation("op", "y", ("x",), ("y",), {}, refuse)
    assert Region(trace, [operation], "y", X).compute_error(TrialChange("k", "t", operation)) == math.inf


def test_factors_are_named() -> None:
    assert name_factor(0.25, (4, 8)) == "0.25 = 1/4"
    assert name_factor(1.01, (4, 8)) == "1.01"


def test_permutations_of_heads_keep_all_elements() -> None:
    for _, _, moved in permute_heads(X, (2, 4, 8)):
        np.testing.assert_array_equal(np.sort(moved), np.sort(X))


def test_roundings_are_as_near_as_their_steps() -> None:
    for name, rounded in list_roundings(X[0]):
        step = np.abs(X).max() * (2.0**-8 if name == "bf16" else 2.0**-11 if name == "f16" else 1 / 254)
        assert 0 < np.abs(rounded - X[0]).max() <= step * (1 + 1e-12), name
