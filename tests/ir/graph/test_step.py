"""Steps of recurrences: their text, equality, copies, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest

from weft.ir import OPS, Graph, TensorType, WeftError, dtypes, interpret, ops, parse, verify
from weft.ir.graph.analysis import hash_structure
from weft.ir.graph.step import BATCH, Step
from weft.ir.ops.loops import cast_step
from weft.ir.testing import build_node_graph
from weft.ir.text.parser import parse_step
from weft.ir.types import sizes
from weft.passes import run_passes

STEP = """{
  state %h: f32[batch, 4] = -1e+30
  state %c: f32[batch, 2, 2]
  token %x: f32[batch, 4]
  constant %w: f32[4, 4]
  %u: f32[batch, 4] = linear(%x, %w)
  %new: f32[batch, 4] = maximum(%h, %u)
  %r: f32[batch, 2, 2] = reshape(%new, shape=[batch, 2, 2])
  %c_2: f32[batch, 2, 2] = add(%c, %r)
  next %h = %new
  next %c = %c_2
  output y = %new
}"""


def test_text_round_trips() -> None:
    step = parse_step(STEP)
    assert step.text == str(step.__spelled__) == STEP
    assert step.states == ("h", "c") and step.tokens == ("x",) and step.constants == ("w",) and step.outputs == ("y",)
    assert step.initial == {"h": -1e30, "c": 0.0}


def test_equality_is_that_of_the_text() -> None:
    step, same = parse_step(STEP), parse_step(re.sub(r"\n +", "\n", STEP))
    assert step == same and hash(step) == hash(same) and repr(step) == repr(same)
    other = parse_step(STEP.replace("-1e+30", "-0.0"))
    assert other != step and other != parse_step(STEP.replace("-1e+30", "0.0"))
    assert step != STEP


def test_copies_and_pickles() -> None:
    step = parse_step(STEP)
    assert step == copy.copy(step) == copy.deepcopy(step) == pickle.loads(pickle.dumps(step))


def test_equality_ignores_unused_values_and_scopes() -> None:
    graph = Graph("any")
    h = graph.add_input("h", TensorType(dtypes.f32, (BATCH, 4)))
    x = graph.add_input("layer.x", TensorType(dtypes.f32, (BATCH, 4)))
    with graph.scope("layers.3.mixer"):
        new = ops.add(h, x, name="new")
        ops.exp(new)
    graph.add_output("next.h", new)
    graph.add_output("y", new)
    step = Step(graph, {"h": 0.0}, ["layer.x"])
    assert "layers" not in step.text and "exp" not in step.text and step.tokens == ("x",)
    ops.tanh(new)  # changes nothing of the step
    assert step == Step(graph, {"h": 0.0}, ["layer.x"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("next %c = %c_2", "next %c = %new", r"the state c has type f32.*, but its new value f32\[batch, 4\]"),
        ("  next %c = %c_2\n", "", "the state %c has no new value"),
        ("next %c", "next %x", "%x is not a state"),
        ("-1e+30", "-inf", "begins with -inf; begin with a finite number"),
        ("token %x: f32[batch, 4]", "token %x: f32[batch, 4]\n  token %late: f32[4]", "first axis must be batch"),
        ("constant %w: f32[4, 4]", "constant %w: f32[4, 4]\n  constant %o: f32[seq]", "but seq is not allowed"),
        ("  output y = %new\n", "", "needs states, tokens and outputs, but it has 2, 1 and 0 of them"),
        ("state %c", "state %x", "defined twice|already has an input"),
        ("output y = %new", "output y = %nothing", "not defined"),
        ("token %x: f32[batch, 4]", "token %past_h: f32[batch, 4]\n  token %x: f32[batch, 4]", "begins with past_"),
        ("maximum(%h", "maximum(%x %h", "expected ,"),
        ("next %h = %new", "then %h = %new", "expected state, token, constant, next, output or a node"),
    ],
)  # fmt: skip
def test_refusals(old: str, new: str, message: str) -> None:
    assert old in STEP
    with pytest.raises(WeftError, match=message):
        parse_step(STEP.replace(old, new))


def test_text_after_a_step_is_refused() -> None:
    with pytest.raises(WeftError, match="unexpected text after the step"):
        parse_step(STEP + " %x")


def scans(count: int = 1) -> Graph:
    """A graph of as many equal scans of the same values."""
    graph, step = Graph("scans"), parse_step(STEP)
    batch, seq = sizes.sym("batch"), sizes.sym("seq")
    x = graph.add_input("x", TensorType(dtypes.f32, (batch, seq, 4)))
    w = graph.add_input("w", TensorType(dtypes.f32, (4, 4)))
    for i in range(count):
        with graph.scope(f"layers.{i}"):
            graph.add_output(f"y{i}", ops.scan(x, w, step=step)[0])
    return graph


def test_a_graph_with_a_step_round_trips_and_is_cloned() -> None:
    graph = scans(2)
    verify(graph)
    assert parse(str(graph)) == graph == graph.clone()
    assert "\n      state %h: f32[batch, 4] = -1e+30\n" in str(graph)


def test_equal_scans_are_one() -> None:
    graph = scans(2)
    first, second = graph.nodes
    assert hash_structure([first]) == hash_structure([second])
    assert len(run_passes(graph, "cse").nodes) == 1


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (0, "takes 2 values .x, w. or 4 with states, not 1"),
        (1, r"w f32\[2, 4\] must be f32\[4, 4\]"),
        (2, r"x f32\[2, 3, 5\] must be f32\[2, 3, 4\]: the step reads f32\[2, 4\] for each token"),
        (3, r"c f32\[2, 4\] must be f32\[2, 2, 2\]"),
        (4, r"x f64\[2, 3, 4\] must be f32\[2, 3, 4\]"),
    ],
)
def test_operands_that_do_not_fit(operands: int, message: str) -> None:
    def f32(*shape: int) -> TensorType:
        return TensorType(dtypes.f32, shape)

    given = [
        [f32(2, 3, 4)],
        [f32(2, 3, 4), f32(2, 4)],
        [f32(2, 3, 5), f32(4, 4)],
        [f32(2, 3, 4), f32(4, 4), f32(2, 4), f32(2, 4)],
        [f32(2, 3, 4).with_dtype(dtypes.f64), f32(4, 4)],
    ][operands]
    with pytest.raises(WeftError, match=message):
        OPS["scan"].types(given, {"step": parse_step(STEP)})


def test_operands_have_names() -> None:
    graph = scans()
    (node,) = graph.nodes
    assert node.operand("w") is graph.inputs["w"] and node.operand("past_c") is None
    assert node.op.result_names([None] * 2, node.attrs) == ("y",)
    values = list(graph.inputs.values())
    assert node.op.result_names([*values, *values], node.attrs) == ("y", "present_h", "present_c")


def test_a_step_beside_narrow_operands_computes_wide() -> None:
    """Inputs, constants and outputs in f16, states and what is between in f32."""
    step = cast_step(parse_step(STEP), [dtypes.f16, dtypes.f16])
    types = {name: str(v.type.dtype) for name, v in step.graph.inputs.items()}
    assert types == {"h": "f32", "c": "f32", "x": "f16", "w": "f16"}
    assert step.graph.outputs["y"].type.dtype == dtypes.f16
    assert {str(n.output.type.dtype) for n in step.graph.nodes if n.op.name in ("linear", "maximum", "add")} == {"f32"}
    assert parse_step(step.text) == step
    assert cast_step(step, [dtypes.f32, dtypes.f32]) == parse_step(STEP)
    wide = build_node_graph(OPS["scan"], OPS["scan"].cases[2])
    (found,) = (interpret(*wide)["y0"],)
    case = OPS["scan"].cases[2]
    narrow = cast_step(case.attrs["step"], [dtypes.f16, dtypes.f16])
    made = OPS["scan"].run_reference(case.draw(), {"step": narrow})
    np.testing.assert_array_equal(made[0], found)
