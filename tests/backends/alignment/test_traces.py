"""Traces: layouts in which arrays correspond, errors, dependencies."""

from __future__ import annotations

import math

import numpy as np
import pytest

from weft.backends.alignment.traces import (
    Operation,
    ValueTrace,
    align_traces,
    arrange,
    compute_error,
    find_counterpart,
    is_distinctive,
)


def operation(makes: str, *reads: str) -> Operation:
    return Operation("op", makes, reads, (makes,), {}, lambda operands, attrs: [])


@pytest.mark.parametrize("shape", [(1, 4, 6, 8), (6, 1, 4, 8), (24, 8), (1, 6, 32)])
def test_permuted_and_merged_axes_are_arranged(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=(1, 6, 4, 8))
    moved = x.transpose(0, 2, 1, 3) if shape == (1, 4, 6, 8) else x.reshape(shape)
    for a, b in ((x, moved), (moved, x)):
        pair = arrange(a, b)
        assert pair is not None and np.array_equal(*pair)


def test_the_order_of_features_is_not_taken_for_a_layout() -> None:
    """Interleaved halves of heads are not another layout of [tokens, features], although a permutation gives them."""
    x = np.random.default_rng(0).normal(size=(1, 6, 2, 8))
    interleaved = x.reshape(6, 2, 2, 4).swapaxes(2, 3).reshape(1, 6, 16)
    pair = arrange(x, interleaved + 0.1)
    assert pair is not None and np.array_equal(pair[0], x.reshape(1, 6, 16))


def test_last_rows_and_first_features_are_compared() -> None:
    x = np.arange(24.0).reshape(1, 4, 6)
    for a, b, want in ((x, x[:, -1:], x[0, -1:]), (x, x[:, -2:], x[0, -2:]), (x[..., :5], x, x[0, :, :5])):
        pair = arrange(a, b)
        assert pair is not None and np.array_equal(pair[0], want) and np.array_equal(pair[1], want)
    assert arrange(x, np.arange(15.0).reshape(3, 5)) is None


def test_errors_of_all_elements_and_of_rows() -> None:
    want, got = np.array([[100.0, 0.0], [1.0, 0.0]]), np.array([[100.0, 0.0], [1.0, 0.5]])
    assert compute_error(got, want) == 0.005
    assert compute_error(got, want, by_row=True) == 0.5
    assert compute_error(np.array([-np.inf, 1.0]), np.array([-np.inf, 1.0])) == 0
    assert math.isnan(compute_error(np.array([np.nan]), np.array([1.0])))


def test_distinctive_contents() -> None:
    x = np.arange(9.0)
    assert is_distinctive(x)
    assert not any(map(is_distinctive, (x[:4], np.ones(9), np.arange(9), np.append(x, np.inf))))


def test_ancestors_stop_at_given_values_and_constants_load_once() -> None:
    loads: list[int] = []
    constants = {"w": ((2,), lambda: loads.append(1) or np.ones(2))}
    values = {name: np.ones(2) for name in "abcd"}
    trace = ValueTrace([operation("b", "a", "w"), operation("c", "b"), operation("d", "c", "a")], values, constants)
    assert trace.find_ancestors(["d"]) == {"a", "b", "c", "d"}
    assert trace.find_ancestors(["d"], {"c"}) == {"a", "c", "d"}
    assert trace.makers["c"].reads == ("b",)
    assert trace.load("w") is trace.load("w") and loads == [1]
    assert trace.load("nothing") is None


RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 1, 6, 16))
TOLERANCE = 1e-5


def trace(outputs: dict[str, str], **made: tuple[np.ndarray, str]) -> ValueTrace:
    """Return a trace in which each value is made by an operation that reads the named ones; without one, an input."""
    operations = [
        Operation("op", name, tuple(reads.split()), (name,), {}, lambda operands, attrs: [])
        for name, (_, reads) in made.items()
        if reads
    ]
    return ValueTrace(operations, {name: x for name, (x, _) in made.items()}, {}, outputs)


def heads(x: np.ndarray) -> np.ndarray:
    """Return [1, seq, 16] as [1, heads, seq, 4], in f32."""
    return x.reshape(1, 6, 4, 4).transpose(0, 2, 1, 3).astype(np.float32)


def test_equal_contents_agree_in_any_layout() -> None:
    a, b = align_traces(
        trace({"o": "q"}, x=(X, ""), q=(Y, "x")), trace({"p": "r"}, z=(heads(X), ""), r=(heads(Y), "z")), TOLERANCE
    )
    assert a.classes == {"x": "x", "q": "q"} and b.classes == {"z": "x", "r": "q"}
    assert a.find_suspects() == b.find_suspects() == []


def test_values_without_a_counterpart_are_no_suspects_if_their_readers_agree() -> None:
    ours = trace({"o": "c"}, x=(X, ""), b=(X * 3, "x"), c=(Y, "b"))
    theirs = trace({"o": "c"}, x=(X, ""), c=(Y, "x"))
    assert [side.find_suspects() for side in align_traces(ours, theirs, TOLERANCE)] == [[], []]


def test_suspects_begin_where_contents_differ() -> None:
    ours = trace({"o": "d"}, x=(X, ""), b=(Y, "x"), c=(Y + X, "b x"), d=(Y * X, "c"))
    theirs = trace({"o": "d"}, x=(X, ""), b=(Y, "x"), c=(Y - X, "b x"), d=(Y * 2, "c"))
    a, b = align_traces(ours, theirs, TOLERANCE)
    assert a.find_suspects() == b.find_suspects() == ["c", "d"]
    assert find_counterpart(a, b, "c", (["c", "d"], ["c", "d"])) == "c"


def test_a_sum_with_zero_is_no_evidence_for_its_other_operand() -> None:
    ours = trace({"o": "s"}, x=(X, ""), b=(0 * Y, "x"), s=(X + 0 * Y, "x b"))
    theirs = trace({"o": "t"}, x=(X, ""), b=(Y, "x"), t=(X + Y, "x b"), extra=(X, "x"))
    assert "b" in align_traces(ours, theirs, TOLERANCE)[0].find_suspects()


def test_all_results_of_an_operation_must_agree() -> None:
    """One half of a split that agrees is no evidence that the whole does."""
    made = {"x": X, "whole": np.concatenate([X, Y], -1), "u": X * 2, "v": Y}
    split = Operation("split", "split", ("whole",), ("u", "v"), {}, lambda operands, attrs: [])
    last = Operation("add", "s", ("u", "v"), ("s",), {}, lambda operands, attrs: [])
    first = Operation("linear", "whole", ("x",), ("whole",), {}, lambda operands, attrs: [])
    ours = ValueTrace([first, split, last], {**made, "s": X + Y}, {}, {"o": "s"})
    theirs = ValueTrace([first, split, last], {**made, "whole": X.repeat(2, -1), "v": X * 3, "s": X}, {}, {"o": "s"})
    assert align_traces(ours, theirs, TOLERANCE)[0].find_suspects() == ["whole", "v", "s"]


def test_counterparts_without_a_name_depend_on_the_same_values_and_are_similar() -> None:
    ours = trace({"o": "n"}, x=(X, ""), y=(Y, ""), n=(1.1 * X, "x"), m=(1.1 * Y, "y"))
    theirs = trace(
        {"p": "d"}, z=(X, ""), w=(Y, ""), a=(Y * 0.9, "w"), b=(X**2, "z"), c=(X * 0.9, "z"), d=(X * 0.8, "c")
    )
    a, b = align_traces(ours, theirs, TOLERANCE)
    suspects = ["n", "m"], ["a", "b", "c", "d"]
    assert find_counterpart(a, b, "n", suspects) == "d"  # the last of several
    assert find_counterpart(a, b, "m", suspects) == "a"


def test_results_of_fused_operations_count_as_what_they_depend_on() -> None:
    """A fused norm reads the operands of the sum that it also returns; elsewhere a norm reads the sum."""
    fused = Operation("SkipNorm", "skip", ("x", "y"), ("normed", "sum"), {}, lambda operands, attrs: [])
    ours = ValueTrace([fused], {"x": X, "y": Y, "normed": (X + Y) * 0.5, "sum": X + Y}, {}, {"o": "normed"})
    theirs = trace({"p": "n"}, u=(X, ""), v=(Y, ""), s=(X + Y, "u v"), n=((X + Y) * 0.6, "s"))
    a, b = align_traces(ours, theirs, TOLERANCE)
    assert a.find_suspects() == ["normed"] and b.find_suspects() == ["n"]
    assert find_counterpart(a, b, "normed", (["normed"], ["n"])) == "n"


def test_labels_that_differ_give_way_to_equal_contents() -> None:
    ours, theirs = trace({"o": "c"}, e=(X, ""), c=(X * 4, "e")), trace({"o": "d"}, i=(Y, ""), d=(X * 4, "i"))
    ours.labels, theirs.labels = {"embed": "e"}, {"embed": "d"}
    a, b = align_traces(ours, theirs, TOLERANCE)
    assert a.classes["c"] == b.classes["d"] and "e" not in a.partners


def test_values_agree_with_features_of_a_packed_value() -> None:
    packed = np.concatenate([Y, X * 2, X], -1)
    ours = trace({"o": "s"}, x=(X, ""), q=(X * 2, "x"), k=(X * 4, "x"), s=(Y, "q k"))
    theirs = trace({"o": "t"}, z=(X, ""), qkv=(packed, "z"), t=(-Y, "qkv"))
    assert "q" in align_traces(ours, theirs, TOLERANCE)[0].classes
    assert align_traces(ours, theirs, TOLERANCE)[0].find_suspects() == ["k", "s"]
    assert align_traces(theirs, ours, TOLERANCE)[1].find_suspects() == ["k", "s"]
