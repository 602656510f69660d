"""gqa-to-mha: every query head gets its own copy of its KV head."""

from __future__ import annotations

import pytest

from weft.ir import WeftError, ops
from weft.passes import lookup
from weft.passes.core.equivalence import EXACT
from weft.passes.edits.edit import rebuild_node

from ...models import Tiny, applied, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO
from .head_graphs import GRAPHS, attentions, check_exact_and_idempotent, check_refused, rows_taken


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("name", GRAPHS)
def test_repeat_keeps_outputs(name: str) -> None:
    after = check_exact_and_idempotent(ZOO[name](), "gqa-to-mha")
    assert all(a["heads"] == a["kv_heads"] for a in attentions(after))


def test_one_key_head_becomes_some_then_all() -> None:
    graph = Tiny(kv_heads=1).graph()
    two = applied("gqa-to-mha{kv_heads=2}", graph)
    assert [a["kv_heads"] for a in attentions(two)] == [2, 2]
    assert two.params["layers.0.attn.k.weight"].shape == (8, 18)
    six = applied("gqa-to-mha", two)
    assert worst(graph, two) == 0 and worst(graph, six) == 0
    assert str(applied("gqa-to-mha", graph)) != str(six) and worst(applied("gqa-to-mha", graph), six) == 0


@pytest.mark.parametrize(
    ("pipeline", "name", "reason"),
    [
        ("gqa-to-mha{kv_heads=3}", "variant/grouped", "3 is not a multiple of its 2 KV heads"),
        ("gqa-to-mha{kv_heads=4}", "variant/grouped", "4 KV heads do not divide its 6 query heads"),
        ("gqa-to-mha", "variant/latent", "its keys are its values too"),
        ("gqa-to-mha", "cached/family mistral-gqa", "run gqa-to-mha before kv-cache"),
    ],
)
def test_repeat_refuses(pipeline: str, name: str, reason: str) -> None:
    check_refused(pipeline, name, reason)


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("gqa-to-mha{kv_heads=0}", "kv_heads=0 must be positive"),
    ],
)
def test_repeat_rejects_arguments(pipeline: str, reason: str) -> None:
    with pytest.raises(WeftError, match=reason):
        applied(pipeline, Tiny().graph())


def test_copies_of_a_head_are_adjacent() -> None:
    graph = Tiny(layers=1, rope=False).graph()
    for repeated, error in (((0, 0, 0, 1, 1, 1), 0.0), ((0, 1, 0, 1, 0, 1), 0.05)):
        by_hand = graph.clone()
        for part in "kv":
            (linear,) = (n for n in by_hand.nodes if n.output.name == f"layers.0.attn.{part}")
            rows_taken(by_hand, f"layers.0.attn.{part}.weight", repeated)
            rebuild_node(linear)
        (node,) = (n for n in by_hand.nodes if n.op is ops.attention)
        rebuild_node(node, kv_heads=6)
        found = worst(graph, by_hand)
        assert found > error if error else found == 0


def test_repeat_documents_its_tradeoff() -> None:
    assert lookup("gqa-to-mha").tradeoff


@pytest.mark.parametrize("method", ["mean", "first"])
@pytest.mark.parametrize("name", ["variant/grouped", "variant/norms of q and k", "packed/family phi3"])
def test_repeated_heads_merge_without_loss(name: str, method: str) -> None:
    """GQA to MHA, whose heads are then identical in each group; back to GQA; and to MHA once more: one function."""
    graphs = [ZOO[name]()]
    (kv_heads,) = {a["kv_heads"] for a in attentions(graphs[0])}
    for pipeline in ("gqa-to-mha", f"mha-to-gqa{{kv_heads={kv_heads}, method={method}}}", "gqa-to-mha"):
        graphs.append(applied(pipeline, graphs[-1]))
        assert worst(graphs[0], graphs[-1]) <= EXACT
    assert attentions(graphs[2])[0]["kv_heads"] == kv_heads
    assert attentions(graphs[3])[0]["kv_heads"] == attentions(graphs[3])[0]["heads"]
