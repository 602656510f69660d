"""fuse-qkv and fuse-latent: heads of a decode step with norm, projections and rotation."""

from __future__ import annotations

import pytest

from weft.passes import Report, run_passes

from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def test_unsupported_bias_is_reported() -> None:
    report = Report()
    run_passes(ZOO["variant/T5 bias, per layer"](), "decode-torch", report=report)
    (qkv,) = (r for r in report.records if r.applied.name == "fuse-qkv")
    assert any("it has a bias that is not ALiBi's" in line for line in qkv.trace.lines)
