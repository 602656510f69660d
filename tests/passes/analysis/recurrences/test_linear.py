"""Linear parts of steps: L of new state = L(state) + b, and the axis that it mixes."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import interpret
from weft.ir.text.parser import parse_step
from weft.passes.analysis.recurrences.linear import find_linear_parts

MATRIX = """{
  state %s: f32[batch, 3, 5]
  token %m: f32[batch, 3, 3]
  token %b: f32[batch, 3, 5]
  %moved: f32[batch, 3, 5] = matmul(%m, %s)
  %n: f32[batch, 3, 5] = add(%b, %moved)
  next %s = %n
  output y = %n
}"""


def test_linear_part_is_the_step_without_its_constant_term() -> None:
    parts = find_linear_parts(parse_step(MATRIX))
    assert parts is not None
    part = parts["s"]
    assert part.order == (0, 1, 2) and part.columns  # it mixes axis 1, and acts on each column alike
    rng = np.random.default_rng(0)
    feeds = {
        "s": rng.standard_normal((2, 3, 5)),
        "m": rng.standard_normal((2, 3, 3)),
        "b": rng.standard_normal((2, 3, 5)),
    }
    np.testing.assert_allclose(interpret(part.graph, feeds)["next"], feeds["m"] @ feeds["s"], atol=1e-12)


def test_state_without_columns() -> None:
    parts = find_linear_parts(
        parse_step(
            "{ state %s: f32[batch, 3] token %m: f32[batch, 3, 3] %c: f32[batch, 3, 1] = unsqueeze(%s, axes=[2]) "
            "%p: f32[batch, 3, 1] = matmul(%m, %c) %n: f32[batch, 3] = squeeze(%p, axes=[2]) "
            "next %s = %n output y = %n }"
        )
    )
    assert parts is not None and parts["s"].order == (0, 1) and not parts["s"].columns


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("add(%b, %moved)", "mul(%s, %moved)"),  # quadratic
        ("add(%b, %moved)", "tanh(%moved)"),
        ("matmul(%m, %s)", "mul(%b, %s)"),  # mixes no axis
    ],
)
def test_other_steps_have_no_linear_part(old: str, new: str) -> None:
    assert find_linear_parts(parse_step(MATRIX.replace(old, new))) is None


def test_mixed_axis_that_is_much_longer_than_the_columns_has_no_linear_part() -> None:
    wide = MATRIX.replace("3, 5]", "17, 2]").replace("3, 3]", "17, 17]")
    assert find_linear_parts(parse_step(wide)) is None
    assert find_linear_parts(parse_step(wide.replace("17", "16"))) is not None
