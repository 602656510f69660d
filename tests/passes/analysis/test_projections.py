"""Reading the linears around an attention, packed and unpacked, and taking packed ones apart."""

from __future__ import annotations

import pytest

from weft.ir import Graph, Node, ops, verify
from weft.ir.recipes import Full, Scale, Slice, Source
from weft.passes.analysis.projections import Projections, find_projections, unpack_branch

from ..models import Tiny, applied, count, worst

MODELS = {
    "plain": Tiny(),
    "biases": Tiny(bias="q v gate"),
    "qk-norm": Tiny(qk_norm=True),
    "layer norm": Tiny(norm="layer", rope=False, bias="q k v gate up"),
}


def attentions(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op is ops.attention]


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


def test_reads_through_packing() -> None:
    for text in ("dce", "pack-qkv"):
        graph = applied(text, Tiny(qk_norm=True).graph())
        found = find_projections(attentions(graph)[1])
        assert isinstance(found, Projections)
        assert [n.op.name for n in found.k.between] == ["reshape", "rms_norm", "reshape", "rope"]
        assert (found.heads, found.kv_heads, found.head_dim) == (6, 2, 4)
        assert found.k.is_packed == (text == "pack-qkv")
        assert found.o.output.name == "layers.1.attn.o"
        k = unpack_branch(found.node, "k")
        verify(graph)
        assert not k.is_packed and k.weight.shape == (8, 18)


def test_who_else_reads() -> None:
    graph = Tiny().graph()
    node = attentions(graph)[0]
    k = node.operand("k")
    assert k is not None
    graph.add_output("keys", k)
    assert find_projections(node) == "k (%layers.0.attn.k_rope) is read by the caller too"


def test_rows_without_detours() -> None:
    graph = applied("pack-qkv, unpack, pack-qkv, unpack, pack-qkv", Tiny().graph())
    recipe = graph.params["layers.0.attn.qkv.weight"].recipe
    assert len(recipe.parts) == 3 and not recipe.has(Slice)
    assert not recipe.has(Source, Scale, Full)
