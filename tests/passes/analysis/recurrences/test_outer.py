"""States of linear attention: keys, values, decays and queries of a step, against the recurrence itself."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import interpret
from weft.ir.text.parser import parse_step
from weft.passes.analysis.recurrences.affine import find_affine_form
from weft.passes.analysis.recurrences.outer import ParallelForm, derive_parallel_form

LINEAR_ATTENTION = """{
  state %s: f32[batch, 2, 3, 4]
  token %q: f32[batch, 2, 3]
  token %k: f32[batch, 2, 3]
  token %v: f32[batch, 2, 4]
  token %g: f32[batch, 2, 1, 1]
  %kc: f32[batch, 2, 3, 1] = unsqueeze(%k, axes=[3])
  %vr: f32[batch, 2, 1, 4] = unsqueeze(%v, axes=[2])
  %kv: f32[batch, 2, 3, 4] = mul(%kc, %vr)
  %kept: f32[batch, 2, 3, 4] = mul(%g, %s)
  %n: f32[batch, 2, 3, 4] = add(%kept, %kv)
  %qr: f32[batch, 2, 1, 3] = unsqueeze(%q, axes=[2])
  %r: f32[batch, 2, 1, 4] = matmul(%qr, %n)
  %y: f32[batch, 2, 4] = squeeze(%r, axes=[2])
  next %s = %n
  output y = %y
}"""


def form_of(text: str) -> ParallelForm:
    step = parse_step(text)
    affine = find_affine_form(step)
    assert affine is not None
    return derive_parallel_form(step, affine)


def test_state_is_a_decayed_sum_of_outer_products() -> None:
    form = form_of(LINEAR_ATTENTION)
    state = form.outer["s"]
    assert state is not None and (state.groups, state.reads, state.changes) == (2, 1, False)
    assert state.order == (0, 1, 2, 3)  # batch, groups, keys, values
    rng = np.random.default_rng(0)
    shapes = {"q": (1, 2, 3), "k": (1, 2, 3), "v": (1, 2, 4), "g": (1, 2, 1, 1)}
    old = rng.standard_normal((1, 2, 3, 4))
    feeds = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    gates = interpret(form.gates, feeds)
    assert set(gates) == {"a.s", "k.s", "v.s", "q0.s"}
    new = gates["a.s"][..., None] * old + gates["k.s"][..., None] * gates["v.s"][..., None, :]
    read = np.einsum("bgk,bgkv->bgv", gates["q0.s"], new)
    y = interpret(form.after, {**{n: feeds[n] for n in form.after.inputs if n in feeds}, "read0_s": read})["y"]
    wanted = interpret(parse_step(LINEAR_ATTENTION).graph, {"s": old, **feeds})
    np.testing.assert_allclose(y, wanted["y"], atol=1e-12)
    np.testing.assert_allclose(new, wanted["next.s"], atol=1e-12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("output y = %y", "output y = %y output state = %n"),  # the state itself is an output
        ("mul(%kc, %vr)", "mul(%g, %full)"),  # no product of a key and a value
        ("matmul(%qr, %n)", "matmul(%qr, %s)"),  # reads the old state
    ],
)
def test_other_states_are_computed_at_every_token(old: str, new: str) -> None:
    text = LINEAR_ATTENTION.replace(old, new)
    if "%full" in text:
        text = text.replace("  token %g", "  token %full: f32[batch, 2, 3, 4]\n  token %g")
        text = text.replace("  %kc: f32[batch, 2, 3, 1] = unsqueeze(%k, axes=[3])\n", "")
        text = text.replace("  %vr: f32[batch, 2, 1, 4] = unsqueeze(%v, axes=[2])\n", "")
    assert form_of(text).outer == {"s": None}
