"""pad-head-dim: heads get features of zeros."""

from __future__ import annotations

import math

import pytest

from weft import Attention, Block, Decoder, GatedMLP, LayerNorm, RMSNorm, RoPE
from weft.ir import Graph, WeftError, ops
from weft.ir.recipes import Concat, Full, Reshape
from weft.passes import Trace, lookup
from weft.passes.core.equivalence import EXACT
from weft.passes.edits.edit import rebuild_node

from ...models import Tiny, applied, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO
from .head_graphs import GRAPHS, check_exact_and_idempotent, check_refused


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("name", GRAPHS)
def test_pad_keeps_outputs(name: str) -> None:
    after = check_exact_and_idempotent(ZOO[name](), "pad-head-dim{multiple=16}")
    if "norms of q and k, each" not in name:
        widths = {n.operand("q").width // n.attrs["heads"] for n in after.nodes if n.op is ops.attention}
        assert {w % 16 for w in widths} == {0}


@pytest.mark.parametrize(
    ("pipeline", "name", "reason"),
    [
        ("pad-head-dim", "variant/gate", "the result is read by mul, not by one linear"),
        ("pad-head-dim", "variant/norms of q and k, each", "takes a mean that zeros would change"),
        ("pad-head-dim{multiple=7}", "cached/family mistral-gqa", "run pad-head-dim before kv-cache"),
    ],
)
def test_pad_refuses(pipeline: str, name: str, reason: str) -> None:
    check_refused(pipeline, name, reason)


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("pad-head-dim{multiple=0}", "multiple=0 must be from 1 to 1024"),
        ("pad-head-dim{multiple=1000000000}", "multiple=1000000000 must be from 1 to 1024"),
    ],
)
def test_pad_rejects_arguments(pipeline: str, reason: str) -> None:
    with pytest.raises(WeftError, match=reason):
        applied(pipeline, Tiny().graph())


def padded(graph: Graph, *, scale: bool = True, norm: bool = True) -> Graph:
    """The one attention of `graph`, heads of 4, with 3 zeros behind each head of q, k and v; by hand."""
    by_hand = graph.clone()

    def longer(name: str, axis: int) -> None:
        param = by_hand.params[name]
        heads = param.shape[axis] // 4
        lead, rest = (*param.shape[:axis], heads), param.shape[axis + 1 :]
        parts = (Reshape(param.recipe, (*lead, 4, *rest)), Full(0.0, (*lead, 3, *rest)))
        shape = (*param.shape[:axis], heads * 7, *rest)
        param.recipe, param.type = Reshape(Concat(parts, axis + 1), shape), param.type.with_shape(*shape)

    prefix = "layers.0.attn"
    for name in "qkv":
        longer(f"{prefix}.{name}.weight", 0)
    longer(f"{prefix}.o.weight", 1)
    for name in ("q_norm", "k_norm"):
        for kind in ("weight", "bias"):
            if f"{prefix}.{name}.{kind}" in by_hand.params:
                longer(f"{prefix}.{name}.{kind}", 0)
    for node in list(by_hand.nodes):
        if node.op is ops.attention:
            rebuild_node(node, scale=0.5 if scale else None)
        elif node.op is ops.reshape and node.scope == prefix:
            *lead, last = node.attrs["shape"]
            rebuild_node(node, shape=(*lead, 7 if len(lead) == 3 else last // 4 * 7))
        elif node.scope == prefix and node.op is ops.rms_norm and norm:
            new = rebuild_node(node, eps=node.attrs["eps"] * 4 / 7)
            with by_hand.inserting(after=new):
                scaled = ops.affine(new.output, by=math.sqrt(4 / 7))
            new.output.replace_uses(scaled, keep=[scaled.producer])
        elif node.scope == prefix and node.op in (ops.linear, ops.rope, ops.rms_norm, ops.layer_norm):
            rebuild_node(node)
    return by_hand


def test_padding_needs_the_old_scale_and_norms_of_the_old_width() -> None:
    def model(norm: object) -> Graph:
        return Decoder(29, 20, 1, Block(Attention(4, 2, 4, RoPE(), qk_norm=norm), GatedMLP(9))).graph()

    plain, rms, layer = model(None), model(RMSNorm(0.3)), model(LayerNorm())
    assert worst(plain, padded(plain)) <= EXACT and worst(rms, padded(rms)) <= EXACT
    assert worst(plain, padded(plain, scale=False)) > 1e-3
    assert worst(rms, padded(rms, norm=False)) > 1e-3
    assert worst(layer, padded(layer)) > 1e-3


def test_pad_documents_its_tradeoff() -> None:
    assert lookup("pad-head-dim").tradeoff


def test_clip_that_excludes_zero_is_refused() -> None:
    graph = Tiny(layers=1).graph()
    (node,) = (n for n in graph.nodes if n.output.name == "layers.0.attn.v")
    with graph.inserting(after=node):
        clipped = ops.clip(node.output, low=0.1, high=3.0, name="clipped")
    node.output.replace_uses(clipped, keep=[clipped.producer])
    trace = Trace()
    assert str(applied("pad-head-dim", graph, trace)) == str(graph)
    assert "maps zeros to other values" in trace.refusals[0].reason
    assert worst(graph, applied("gqa-to-mha", graph)) <= EXACT  # where there are no zeros it does not matter
