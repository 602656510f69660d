"""Feed-forwards of a graph: matched, plain or gated, also with a fused norm."""

from __future__ import annotations

from weft.passes import Trace, run_passes

from ..models import applied, count
from ..zoo import ZOO


def test_norms_that_are_fused_into_linears() -> None:
    """Gates are seen through them; what would have to read the normed value is not."""
    fused = run_passes(ZOO["variant/hand-written gate"](), "fold-norm-scale, fuse-norm-linear")
    assert count(fused, "norm_linear") and count(applied("fuse-glu", fused), "glu") == 2
    relu = run_passes(fused, "replace-activation{to=relu}, permute-neurons, fold-scale", verify=True)
    assert count(relu, "glu") == 2
    trace = Trace()
    assert not count(applied("upcycle-to-moe{experts=3}", fused, trace), "moe")
    assert {r.reason for r in trace.refusals} == {"its norm is fused into it: run before fuse-norm-linear"}
