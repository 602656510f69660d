"""merge-shared-experts: feed-forwards of one value become one."""

from __future__ import annotations

import pytest

from weft.frontends.dsl import MLP, Attention, Block, Decoder, GatedMLP, MoE, Repeat, linear, module
from weft.ir import Graph, Value, ops
from weft.ir.recipes import Full
from weft.passes import Trace
from weft.passes.analysis.feed_forward import FeedForward, match_feed_forward
from weft.passes.core.equivalence import EXACT

from ...models import applied, count, worst
from ...rewrites import Rewrite, rewrites


@module
class Shared:
    """The sum of feed-forwards of one value, perhaps beside experts."""

    parts: tuple[MLP | GatedMLP | MoE, ...]
    factor: float = 1.0
    own_gate: bool = False

    def __call__(self, x: Value) -> Value:
        y = self.parts[0](x)
        for part in self.parts[1:]:
            more = part(x)
            if self.own_gate:
                more = ops.mul(more, ops.sigmoid(linear(x, 1, "open")))
            y = ops.add(y, more if self.factor == 1 else ops.affine(more, by=self.factor))
        return y


def beside(*parts: MLP | GatedMLP | MoE, **settings: float) -> Graph:
    return Decoder(37, 18, 1, Block(Attention(3), Shared(parts, **settings))).graph()


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(
    "parts",
    [
        (GatedMLP(7), GatedMLP(5)),
        (MLP(7, bias=True), MLP(5), MLP(9, bias=True)),
        (MoE(4, 5, 2), GatedMLP(7, limit=1.0), GatedMLP(5, limit=1.0)),
        (GatedMLP(7, "gelu", bias=True), MoE(4, 5, 2), GatedMLP(5, "gelu"), GatedMLP(3, "gelu", bias=True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", ["", "pack-gate-up, ", "fuse-residual-norm, "])
def test_parallel_feed_forwards_become_one(parts: tuple[MLP | GatedMLP, ...], first: str) -> None:
    before = beside(*parts)
    after = applied(f"{first}merge-shared-experts", before)
    wide = [p for p in parts if not isinstance(p, MoE)]
    (found,) = [f for n in after.nodes if isinstance(f := match_feed_forward(n), FeedForward)]
    assert found.hidden == sum(p.hidden for p in wide) and worst(before, after) <= EXACT
    assert count(after, "moe") == len(parts) - len(wide)


def test_feed_forwards_merge_by_activation_and_gate() -> None:
    before = beside(MLP(7, "gelu"), MLP(5, "relu"), MLP(3, "gelu"), MLP(2, "relu"), GatedMLP(4))
    trace = Trace()
    after = applied("merge-shared-experts", before, trace)
    found = [f for n in after.nodes if isinstance(f := match_feed_forward(n), FeedForward)]
    assert sorted((f.activation, f.hidden) for f in found) == [("gelu", 10), ("relu", 7), ("silu", 4)]
    assert worst(before, after) <= EXACT and len(trace.refusals) == 1


def test_repeated_layers_share_merged_weights() -> None:
    block = Block(Attention(3), Shared((GatedMLP(7), GatedMLP(5))))
    before = Decoder(37, 18, 1, Repeat(block, 2)).graph()
    after = applied("merge-shared-experts", before)
    assert len(after.params) == len(before.params) - 3 and worst(before, after) <= EXACT
    twins = Decoder(37, 18, 2, Block(Attention(3), Shared((MLP(7, bias=True), MLP(5, bias=True))))).graph()
    for p in twins.params.values():  # equal numbers do not make equal weights
        p.recipe = Full(0.5, p.type.concrete({}))
    assert len(applied("merge-shared-experts", twins).params) == len(twins.params) - 2 * 4


@pytest.mark.parametrize(
    ("parts", "settings", "reason"),
    [
        ((GatedMLP(7), GatedMLP(5)), {"own_gate": True}, "mul multiplies it"),
        ((GatedMLP(7), GatedMLP(5)), {"factor": 0.5}, "affine multiplies it"),
        ((MLP(7, "gelu"), MLP(5, "gelu_tanh")), {}, "its activation or gate differs"),
        ((GatedMLP(7, limit=0.1), GatedMLP(5)), {}, "its activation or gate differs"),
        ((MLP(7, "silu"), GatedMLP(5)), {}, "its activation or gate differs"),
    ],
)
def test_gates_factors_and_other_activations_prevent_merging(
    parts: tuple[MLP | GatedMLP, ...], settings: dict[str, float], reason: str
) -> None:
    before, trace = beside(*parts, **settings), Trace()
    assert str(applied("merge-shared-experts", before, trace)) == str(before)
    assert trace.refusals and all(reason in r.reason for r in trace.refusals)


def test_gated_summand_is_not_merged() -> None:
    """Merging must not treat an expert behind a gate as a summand; a plain factor folds away first."""
    before = beside(GatedMLP(7), GatedMLP(5), own_gate=True)
    wrong = applied("merge-shared-experts", beside(GatedMLP(7), GatedMLP(5)))
    assert worst(before, wrong) > 0.05
    before = beside(GatedMLP(7), GatedMLP(5), factor=0.5)
    after = applied("fold-scale, merge-shared-experts", before)
    assert count(after, "glu") == 1 and worst(before, after) <= EXACT
    for other, error in (("relu", 0.01), ("gelu_tanh", 1e-6)):  # tanh comes near erf, but is not it
        differ = beside(MLP(7, "gelu"), MLP(5, other))
        assert worst(differ, applied("merge-shared-experts", beside(MLP(7, "gelu"), MLP(5, "gelu")))) > error
