"""The delta rule: products with the old state become a coefficient of the value, against the recurrence itself."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import interpret
from weft.ir.text.parser import parse_step
from weft.passes.analysis.recurrences.delta import find_delta_form

DELTA_RULE = """{
  state %s: f32[batch, 2, 3, 4]
  token %q: f32[batch, 2, 3]
  token %k: f32[batch, 2, 3]
  token %v: f32[batch, 2, 4]
  token %b: f32[batch, 2, 1]
  %kr: f32[batch, 2, 1, 3] = unsqueeze(%k, axes=[2])
  %old: f32[batch, 2, 1, 4] = matmul(%kr, %s)
  %seen: f32[batch, 2, 4] = squeeze(%old, axes=[2])
  %gap: f32[batch, 2, 4] = sub(%v, %seen)
  %step: f32[batch, 2, 4] = mul(%b, %gap)
  %kc: f32[batch, 2, 3, 1] = unsqueeze(%k, axes=[3])
  %row: f32[batch, 2, 1, 4] = unsqueeze(%step, axes=[2])
  %change: f32[batch, 2, 3, 4] = mul(%kc, %row)
  %n: f32[batch, 2, 3, 4] = add(%s, %change)
  %qr: f32[batch, 2, 1, 3] = unsqueeze(%q, axes=[2])
  %r: f32[batch, 2, 1, 4] = matmul(%qr, %n)
  %y: f32[batch, 2, 4] = squeeze(%r, axes=[2])
  next %s = %n
  output y = %y
}"""


def test_delta_rule_adds_a_key_times_value_plus_coefficient_of_the_read() -> None:
    """S ← a ⊙ S + k (v + c wᵀS)ᵀ, Yang 2024."""
    text = DELTA_RULE.replace("%seen", "%old_value")
    form = find_delta_form(parse_step(text))
    assert form is not None
    state = form.outer["s"]
    assert state is not None and state.changes and (state.groups, state.reads) == (2, 1)
    rng = np.random.default_rng(0)
    shapes = {"s": (1, 2, 3, 4), "q": (1, 2, 3), "k": (1, 2, 3), "v": (1, 2, 4), "b": (1, 2, 1)}
    feeds = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    gates = interpret(form.gates, {name: feeds[name] for name in form.gates.inputs})
    a = gates["a.s"][..., None] if "a.s" in gates else 1
    read = np.einsum("bgk,bgkv->bgv", gates["w.s"], feeds["s"])
    value = gates["v.s"] + gates["c.s"] * read
    new = a * feeds["s"] + gates["k.s"][..., None] * value[..., None, :]
    np.testing.assert_allclose(new, interpret(parse_step(text).graph, feeds)["next.s"], atol=1e-12)


TWO_STATES = DELTA_RULE.replace("  token %q", "  state %t: f32[batch, 1]\n  token %q").replace(
    "  next %s", "  %u: f32[batch, 1] = exp(%t)\n  next %t = %u\n  next %s"
)


@pytest.mark.parametrize(
    "text",
    [
        TWO_STATES,
        DELTA_RULE.replace("%seen", "%old_value").replace("sub(%v, %old_value)", "tanh(%old_value)"),
        DELTA_RULE.replace("%seen", "%old_value").replace("sub(%v, %old_value)", "relu(%v)"),
        DELTA_RULE.replace("%q: f32[batch, 2, 3]", "%seen: f32[batch, 2, 3]").replace("unsqueeze(%q", "unsqueeze(%seen")
        .replace("%seen: f32[batch, 2, 4] = squeeze", "%other: f32[batch, 2, 4] = squeeze")
        .replace("sub(%v, %seen)", "sub(%v, %other)"),
    ],
    ids=["two states", "not affine in the read", "no read of the old state", "a token with the name of the read"],
)  # fmt: skip
def test_other_steps_are_no_delta_rule(text: str) -> None:
    assert find_delta_form(parse_step(text)) is None
