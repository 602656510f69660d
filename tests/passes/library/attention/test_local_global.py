"""local-global: layers of a pattern get a window, and frequencies of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.ir import Graph, WeftError, ops
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.passes import parse_pipeline, run_passes
from weft.passes.core.equivalence import EquivalenceCheck

from ...rewrites import Rewrite, rewrites
from .decoders import decoder


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


def test_local_and_global_layers_have_their_own_rope_base() -> None:
    def thetas(graph: Graph) -> list[float]:
        return [n.inputs[2].recipe.theta for n in graph.nodes if n.op is ops.rope]

    base = 10_000.0
    text = 'local-global{window=3, pattern="1:1", theta_global=5e5}'
    assert thetas(run_passes(decoder(), text, verify=True)) == [base, base, 5e5, 5e5] * 2
    both = run_passes(decoder(), text.replace("}", ", theta_local=300}"), verify=True)
    assert thetas(both) == [300.0, 300.0, 5e5, 5e5] * 2
    assert sum(isinstance(p.recipe, RopeFrequencies) for p in both.params.values()) == 2
    wrong = both.clone()
    rope = next(n for n in wrong.nodes if n.op is ops.rope)
    rope.inputs[2].recipe = replace(rope.inputs[2].recipe, theta=301.0)
    (one,) = parse_pipeline(text.replace("}", ", theta_local=300}")).passes
    with pytest.raises(WeftError, match=r"frequencies %rope\.frequencies\S* must be those of none, but differ by"):
        one.check(decoder(), wrong, EquivalenceCheck())
