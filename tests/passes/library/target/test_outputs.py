"""drop-outputs and widen-outputs: outputs that a caller does not need, or needs in f32."""

from __future__ import annotations

import pytest

from ...rewrites import Rewrite, rewrites


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()
