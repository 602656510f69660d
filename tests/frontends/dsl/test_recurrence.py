"""The function `scan`: names, parameters inside a step, and the steps that it rejects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import RMSNorm, State, building, linear, module, param, scan
from weft.ir import Graph, TensorType, Value, WeftError, dtypes, interpret, ops, verify
from weft.ir.types import sizes

TYPE = TensorType(dtypes.f32, (sizes.sym("batch"), sizes.sym("seq"), 4))


def graph_of(model: Callable[[Value], Any]) -> Graph:
    with building(Graph("scans")) as graph:
        made = model(graph.add_input("x", TYPE))
        for i, value in enumerate(made if isinstance(made, tuple) else (made,)):
            graph.add_output(f"y{i}", value)
    verify(graph)
    return graph


def test_linear_recurrence() -> None:
    def model(x: Value) -> Value:
        def step(h: Value, x: Value) -> tuple[Value, Value]:
            h = 0.5 * h + x
            return h, h

        y: Value = scan(step, x, state=(4,))
        return y

    graph = graph_of(model)
    x = np.random.default_rng(0).standard_normal((2, 5, 4))
    wanted, h = [], np.zeros((2, 4))
    for t in range(5):
        h = 0.5 * h + x[:, t]
        wanted.append(h)
    np.testing.assert_allclose(interpret(graph, {"x": x})["y0"], np.stack(wanted, 1), rtol=1e-14)
    (node,) = graph.nodes
    assert node.attrs["step"].states == ("h",) and node.attrs["step"].tokens == ("x",)


@module
class Recurrent:
    """A layer whose step has parameters and modules of its own."""

    def __call__(self, x: Value) -> Value:
        bias = param("bias", (4,))
        outside = ops.exp(bias)

        def step(states: tuple[Value, Value], x: Value) -> tuple[tuple[Value, Value], Value]:
            h, most = states
            h = ops.tanh(linear(RMSNorm()(h), 4, "recurrent", bias=True) + x * outside)
            return (h, ops.maximum(most, h)), h * bias

        y: Value = scan(step, x, state={"h": (4,), "most": State((4,), -3.0)})
        return y


def test_step_uses_parameters_of_its_module() -> None:
    graph = graph_of(Recurrent())
    assert set(graph.params) == {
        *("recurrent.bias", "recurrent.recurrent.weight", "recurrent.recurrent.bias", "recurrent.rms_norm.weight")
    }
    assert [node.op.name for node in graph.nodes] == ["exp", "scan"]
    step = graph.nodes.last.attrs["step"] if hasattr(graph.nodes, "last") else list(graph.nodes)[-1].attrs["step"]
    assert step.states == ("h", "most") and step.initial == {"h": 0.0, "most": -3.0}
    assert len(step.constants) == 5


def test_names_inside_a_step_are_local() -> None:
    def model(x: Value) -> tuple[Value, Value]:
        def step(h: Value, x: Value) -> tuple[Value, Value]:
            new = ops.tanh(h + x, name="new")
            return new, new

        return scan(step, x, state=(4,), name="first"), ops.exp(x, name="new")

    graph = graph_of(model)
    assert [v.name for v in graph.outputs.values()] == ["first", "new"]


def test_step_with_several_outputs() -> None:
    def model(x: Value) -> tuple[Value, Value]:
        def step(h: Value, x: Value) -> tuple[Value, tuple[Value, Value]]:
            return h + x, (h, ops.sum(x, axes=(1,)))

        before, total = scan(step, x, state=(4,))
        return before, total

    graph = graph_of(model)
    x = np.random.default_rng(1).standard_normal((2, 5, 4))
    found = interpret(graph, {"x": x})
    np.testing.assert_allclose(found["y0"], np.cumsum(x, 1) - x, atol=1e-14)
    np.testing.assert_allclose(found["y1"], x.sum(2), atol=1e-14)


def _misfits() -> dict[str, tuple[Callable[[Value], Any], str]]:
    return {
        "a state of another shape": (
            lambda x: scan(lambda h, x: (ops.sum(h + x, axes=(1,), keepdims=True), x), x, state=(4,)),
            r"the state h has type f32\[batch, 4\], but its new value f32\[batch, 1\]",
        ),
        "an operand of all tokens": (
            lambda x: scan(lambda h, t: (h + x, h), x, state=(4,)),
            r"do not broadcast; the step reads one token: give values with axis seq as inputs of scan",
        ),
        "a value of all tokens": (
            lambda x: scan(lambda h, t: (h + t, ops.exp(x)), x, state=(4,)),
            r"reads %x f32\[batch, seq, 4\], which has an axis seq: pass it to scan as an input",
        ),
        "no pair": (lambda x: scan(lambda h, x: h + x, x, state=(4,)), r"return a pair \(new state, output\)"),
        "a number": (lambda x: scan(lambda h, x: (h + x, 1.0), x, state=(4,)), "the output of the step is a float"),
        "one state of two": (
            lambda x: scan(lambda s, x: (s[0], x), x, state={"a": (4,), "b": (4,)}),
            "returns 1 new states, not 2",
        ),
        "no state": (lambda x: scan(lambda s, x: ((), x), x, state={}), "needs at least one state"),
        "no shape": (lambda x: scan(lambda h, x: (h, x), x, state="wide"), "must be a shape without"),
        "an infinite start": (
            lambda x: scan(lambda h, x: (h, x), x, state=State((4,), float("-inf"))),
            "begin with a finite number",
        ),
        "no inputs": (lambda x: scan(lambda h: (h, h), state=(4,)), "inputs must be one or more values"),
        "an input of other tokens": (
            lambda x: scan(lambda h, x, y: (h, x), x, ops.transpose(x, axes=(1, 0, 2)), state=(4,)),
            r"must have the axes \[batch, seq\] of the first input",
        ),
    }


@pytest.mark.parametrize("case", _misfits())
def test_scan_rejects_steps_that_do_not_fit(case: str) -> None:
    model, message = _misfits()[case]
    with pytest.raises(WeftError, match=message):
        graph_of(model)


def test_rejected_step_leaves_the_graph_unchanged() -> None:
    with building(Graph("scans")) as graph:
        x = graph.add_input("x", TYPE)
        with pytest.raises(WeftError, match="its new value"):
            scan(lambda h, x: (ops.sum(h + x, axes=(1,)), x), x, state=(4,))
        graph.add_output("y", ops.exp(x, name="sum"))
    assert [node.output.name for node in graph.nodes] == ["sum"]
    verify(graph)
