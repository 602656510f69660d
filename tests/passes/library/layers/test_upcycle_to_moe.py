"""upcycle-to-moe: every expert is a copy of the dense feed-forward."""

from __future__ import annotations

import pytest

from weft.frontends.dsl import Attention, Block, Decoder, GatedMLP, MoE
from weft.ir import WeftError, ops
from weft.passes import Trace
from weft.passes.analysis.feed_forward import FeedForward, match_feed_forward
from weft.passes.core.equivalence import EXACT

from ...gated import UNITS, unit
from ...models import applied, count, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "name",
    ["family/gpt2-tied", "packed/family phi3", "variant/clamped gate", "packed/variant repeated", "family/bert"],
)
def test_upcycled_model_keeps_outputs(name: str, k: int) -> None:
    before = ZOO[name]()
    after = applied(f"upcycle-to-moe{{experts=3, top_k={k}}}", before)
    dense = sum(isinstance(match_feed_forward(n), FeedForward) for n in before.nodes)
    assert count(after, "moe") == dense > 0 and worst(before, after) <= EXACT
    routers = {n.inputs[1] for n in after.nodes if n.op is ops.linear and n.output.width == 3}
    shared = name == "packed/variant repeated"
    assert len(routers) == dense // (2 if shared else 1)


def test_without_renormalization_the_model_changes() -> None:
    before = ZOO["preset/smollm2-135m"]()
    wrong = applied("upcycle-to-moe{experts=4}", before)
    for node in wrong.nodes:
        if node.op is ops.route:
            node.attrs["renormalize"] = False
    assert worst(before, wrong) > 0.05


def test_experts_are_not_upcycled_again() -> None:
    trace = Trace()
    before = ZOO["variant/experts, shared"]()
    assert str(applied("upcycle-to-moe{experts=4}", before, trace)) == str(before)
    assert {r.reason for r in trace.refusals} == {"it is a shared expert next to routed ones"}
    before = unit(UNITS["silu"])
    before.add_output("hidden", next(n.output for n in before.nodes if n.op is ops.mul))
    trace = Trace()
    assert str(applied("upcycle-to-moe{experts=4}", before, trace)) == str(before)
    assert trace.refusals[0].reason == "%mul is read by the caller too"
    for wrong in ("experts=4, top_k=5", "experts=1000000000000", "experts=0", "experts=2, top_k=0"):
        with pytest.raises(WeftError, match=r"top_k=\d and experts=\d+ must be 1 ≤ top_k ≤ experts ≤ 1024"):
            applied(f"upcycle-to-moe{{{wrong}}}", before)


def test_names_of_upcycled_weights_are_those_of_experts() -> None:
    dense = Decoder(37, 18, 1, Block(Attention(3), GatedMLP(7, bias=True))).graph()
    mixture = Decoder(37, 18, 1, Block(Attention(3), MoE(4, 7, 2, bias=True))).graph()
    after = applied("upcycle-to-moe{experts=4}", dense)
    assert {n: p.type for n, p in after.params.items()} == {n: p.type for n, p in mixture.params.items()}
