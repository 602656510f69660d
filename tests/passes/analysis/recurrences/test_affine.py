"""Steps that are elementwise affine in their state: the derived factors, against the step itself."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import interpret
from weft.ir.graph.step import NEXT
from weft.ir.text.parser import parse_step
from weft.passes.analysis.recurrences.affine import find_affine_form

HEAD = """{
  state %h: f32[batch, 4]
  token %x: f32[batch, 4]
  token %g: f32[batch, 4]
  constant %c: f32[4]
  %gh: f32[batch, 4] = mul(%g, %h)
"""
BODIES = {
    "gated": "%n: f32[batch, 4] = add(%gh, %x)",
    "subtracted": "%n: f32[batch, 4] = sub(%x, %gh)",
    "twice": "%n: f32[batch, 4] = sub(%gh, %h)",
    "scaled": "%s: f32[batch, 4] = affine(%gh, by=0.5, plus=2.0) %n: f32[batch, 4] = div(%s, %c)",
    "selected": "%z: f32[batch, 4] = exp(%x) %b: bool[batch, 4] = less(%x, %g) %n: f32[batch, 4] = where(%b, %gh, %z)",
    "reshaped": "%r: f32[batch, 2, 2] = reshape(%gh, shape=[batch, 2, 2]) "
    "%q: f32[batch, 2, 2] = neg(%r) %n: f32[batch, 4] = reshape(%q, shape=[batch, 4])",
}


@pytest.mark.parametrize("name", BODIES)
def test_new_state_is_a_times_state_plus_b(name: str) -> None:
    step = parse_step(f"{HEAD}{BODIES[name]} %y: f32[batch, 4] = mul(%n, %h) next %h = %n output y = %y }}")
    form = find_affine_form(step)
    assert form is not None
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(v.type.concrete({"batch": 3})) for n, v in step.graph.inputs.items()}
    wanted = interpret(step.graph, feeds)
    parts = interpret(form.gates, {n: x for n, x in feeds.items() if n != "h"})
    new = parts.get("a.h", 1) * feeds["h"] + parts.get("b.h", 0)
    np.testing.assert_allclose(new, wanted[NEXT + "h"], atol=1e-12)
    np.testing.assert_allclose(interpret(form.after, {**feeds, "new_h": new})["y"], wanted["y"], atol=1e-12)


@pytest.mark.parametrize(
    "body",
    [
        "%n: f32[batch, 4] = mul(%gh, %h)",  # quadratic
        "%n: f32[batch, 4] = tanh(%gh)",
        "%n: f32[batch, 4] = div(%x, %gh)",
        "%e: f32[batch, 4] = softmax(%h, axis=1) %n: f32[batch, 4] = mul(%e, %x)",
        "%n: f32[batch, 4] = cumsum(%gh, axis=0)",  # mixes batch rows
        "%n: f32[batch, 4] = mul(%h, %c)",  # no token reaches the state
    ],
)
def test_other_steps_have_no_affine_form(body: str) -> None:
    step = parse_step(f"{HEAD}{body} %y: f32[batch, 4] = add(%n, %gh) next %h = %n output y = %y }}")
    assert find_affine_form(step) is None


def test_states_that_depend_on_each_other_have_no_affine_form() -> None:
    text = (
        "{ state %h: f32[batch, 4] state %k: f32[batch, 4] token %x: f32[batch, 4] %n: f32[batch, 4] = add(%OTHER, %x) "
        "%m: f32[batch, 4] = add(%k, %x) next %h = %n next %k = %m output y = %n }"
    )
    assert find_affine_form(parse_step(text.replace("OTHER", "h"))) is not None
    assert find_affine_form(parse_step(text.replace("OTHER", "k"))) is None
