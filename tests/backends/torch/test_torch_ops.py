"""Ops that are rewritten before they are lowered, as generated modules, against their references in float64."""

from __future__ import annotations

import pytest
import torch

from weft.ir import OPS

from .ops.op_cases import check, examples, find_module


@pytest.mark.parametrize(("name", "number", "held", "dtype"), examples(""))
def test_cases_agree_with_the_reference(name: str, number: int, held: bool, dtype: torch.dtype) -> None:
    check(name, number, held, dtype)


def test_modules_lower_all_other_ops() -> None:
    """Each of these modules has a file of tests that runs the cases of its ops."""
    modules = {find_module(name) for name in OPS} - {""}
    assert modules == {
        *("attention", "custom_recurrences", "dense", "elementwise", "masks", "mixtures", "recurrent", "tensors")
    }
