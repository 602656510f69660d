"""The registry of decode-step lowerings."""

from __future__ import annotations

import pytest

from weft.backends.torch.decode.step_registry import STEPS, step_lowering
from weft.ir import OPS, WeftError, ops
from weft.ir.op import Trait

from .fused_ops import CASES, FUSED, cases_of


def test_every_fused_op_has_a_lowering() -> None:
    assert {op for op in OPS.values() if Trait.FUSED in op.traits} == {*FUSED}


def test_cases_of_all_modules_are_tested() -> None:
    """Each of these modules has a file of tests with the cases of its ops."""
    modules = ("beginning", "step_attention", "step_experts", "step_linear", "step_recurrences")
    assert sorted(n for module in modules for n in cases_of(module)) == sorted(CASES)


def test_a_lowering_refuses_nothing_unless_it_says_so() -> None:
    assert STEPS["rotary_angles"].when(None, None) is None


def test_a_second_lowering_of_an_op_is_refused() -> None:
    before = STEPS["norm_glu"]
    with pytest.raises(WeftError, match="norm_glu"):
        step_lowering(ops.norm_glu)(lambda e, node: None)
    assert STEPS["norm_glu"] is before
