"""unfuse: fused ops become the simple ops they were made of."""

from __future__ import annotations

import pytest

from weft.ir.op import Trait
from weft.passes import run_passes
from weft.passes.default import default_pipeline
from weft.passes.edits.legalization import is_fused

from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO
from ..decode.layers import LAYERS


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("name", LAYERS)
def test_unfused_graph_has_no_fused_ops(name: str) -> None:
    """Check that `unfuse` leaves no fused op, and that the default pipeline of a fused graph begins with it."""
    after = run_passes(ZOO[name](), "decode-torch, unfuse, fold-constants", verify=True)
    assert not any(map(is_fused, after.nodes)) and all(Trait.FUSED not in n.op.traits for n in after.nodes)
    step = run_passes(ZOO[name](), "decode-torch")
    assert str(default_pipeline(step)).startswith("simplify: unfuse, ")
    assert not any(map(is_fused, run_passes(step, "default").nodes))
