"""keep-blocks and widen-codes: which weights stay stored codes."""

from __future__ import annotations

import pytest

from ...rewrites import Rewrite, rewrites


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()
