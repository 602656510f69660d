"""unpack: packed linears become the linears they were packed from."""

from __future__ import annotations

import pytest

from weft.ir.recipes import Full, Scale, Slice, Source

from ...models import Tiny, applied, count, worst
from ...rewrites import Rewrite, rewrites

MODELS = {
    "plain": Tiny(),
    "biases": Tiny(bias="q v gate"),
    "qk-norm": Tiny(qk_norm=True),
    "layer norm": Tiny(norm="layer", rope=False, bias="q k v gate up"),
}


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_unpack_undoes_packing(model: Tiny) -> None:
    graph = model.graph()
    packed = applied("pack-qkv, pack-gate-up", graph)
    apart = applied("unpack", packed)
    assert count(packed, "linear") < count(apart, "linear") == count(graph, "linear")
    assert worst(graph, apart) == 0
    assert count(apart, "split") == 0
    named = {p.name: p.recipe for p in apart.params.values()}
    for i in range(2):
        assert named[f"layers.{i}.attn.k.weight"] == graph.params[f"layers.{i}.attn.k.weight"].recipe
    assert applied("unpack", apart) == apart


def test_repeated_packing_keeps_recipes_short() -> None:
    graph = applied("pack-qkv, unpack, pack-qkv, unpack, pack-qkv", Tiny().graph())
    recipe = graph.params["layers.0.attn.qkv.weight"].recipe
    assert len(recipe.parts) == 3 and not recipe.has(Slice)
    assert not recipe.has(Source, Scale, Full)
