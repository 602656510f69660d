"""Reading the linears around an attention, packed and unpacked, and taking packed ones apart."""

from __future__ import annotations

from weft.ir import Graph, Node, ops, verify
from weft.passes.analysis.projections import Projections, find_projections, unpack_branch

from ..models import Tiny, applied


def attentions(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op is ops.attention]


def test_projections_of_packed_linears() -> None:
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


def test_other_readers_are_named() -> None:
    graph = Tiny().graph()
    node = attentions(graph)[0]
    k = node.operand("k")
    assert k is not None
    graph.add_output("keys", k)
    assert find_projections(node) == "k (%layers.0.attn.k_rope) is read by the caller too"
