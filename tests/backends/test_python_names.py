"""python-names: scopes, values and parameters get valid names of Python attributes and variables."""

from __future__ import annotations

import pytest

from ..passes.rewrites import Rewrite, rewrites


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()
