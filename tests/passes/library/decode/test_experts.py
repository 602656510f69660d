"""fuse-mixture and fuse-route: experts of a decode step."""

from __future__ import annotations

import pytest

from ...rewrites import Rewrite, rewrites


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()
