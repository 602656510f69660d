"""Reading the linears around an attention, packed and unpacked, and taking packed ones apart."""

from __future__ import annotations

import pytest

from weft.ir import Graph, Node, verify
from weft.ir.recipes import Full, Scale, Slice, Source, Take
from weft.passes.edit import changed, drop, reweigh
from weft.passes.projections import Projections, projections, replay, separated

from .models import Tiny, applied, count, worst

MODELS = {
    "plain": Tiny(),
    "biases": Tiny(bias="q v gate"),
    "qk-norm": Tiny(qk_norm=True),
    "layer norm": Tiny(norm="layer", rope=False, bias="q k v gate up"),
}


def attentions(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op.name == "attention"]


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
        found = projections(attentions(graph)[1])
        assert isinstance(found, Projections)
        assert [n.op.name for n in found.k.between] == ["reshape", "rms_norm", "reshape", "rope"]
        assert (found.heads, found.kv_heads, found.head_dim, found.value_dim) == (6, 2, 4, 4)
        assert found.k.packed == (text == "pack-qkv")
        assert found.o.output.name == "layers.1.attn.o"
        apart = separated(found)
        verify(graph)
        assert not apart.q.packed and apart.k.weight.shape == (8, 18)


@pytest.mark.parametrize("text", ["dce", "pack-qkv"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_heads_can_be_repeated(model: Tiny, text: str) -> None:
    """A surgery as passes do them: every query head gets a KV head of its own, which changes nothing."""
    graph = applied(text, model.graph())
    before = graph.clone()
    for node in attentions(graph):
        found = projections(node)
        assert isinstance(found, Projections)
        found = separated(found)
        rows = tuple(h // 3 * 4 + i for h in range(6) for i in range(4))
        operands = {}
        for role, branch in (("k", found.k), ("v", found.v)):
            assert branch is not None
            bias = "same" if branch.bias is None else Take(branch.bias.recipe, rows)
            linear = reweigh(branch.linear, Take(branch.weight.recipe, rows), bias, rows=24)
            operands[role] = replay(branch, linear.output, found.node)
        old = found.k.between + (found.v.between if found.v else ())
        changed(found.node, operands, kv_heads=6)
        drop(graph, old)
        verify(graph)
    assert worst(before, graph) < 1e-13
    assert graph.params["layers.0.attn.k.weight"].shape == (24, 18)


def test_who_else_reads() -> None:
    graph = Tiny().graph()
    node = attentions(graph)[0]
    k = node.operand("k")
    assert k is not None
    graph.add_output("keys", k)
    assert projections(node) == "k (%layers.0.attn.k_rope) is read by the caller too"


def test_rows_without_detours() -> None:
    graph = applied("pack-qkv, unpack, pack-qkv, unpack, pack-qkv", Tiny().graph())
    recipe = graph.params["layers.0.attn.qkv.weight"].recipe
    assert len(recipe.parts) == 3 and not recipe.has(Slice)
    assert not recipe.has(Source, Scale, Full)
