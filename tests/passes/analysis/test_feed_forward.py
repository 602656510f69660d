"""Passes on feed-forwards: fuse-glu, merge-shared-experts, upcycle-to-moe, permute-neurons, replace-activation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from weft.frontends.dsl import MLP, Attention, Block, Decoder, GatedMLP, MoE, Repeat, linear, module
from weft.ir import Graph, TensorType, Value, WeftError, ops
from weft.ir.ops.activation import ACTIVATIONS, activate
from weft.ir.recipes import Full, Shuffle
from weft.ir.types import dtypes
from weft.passes import Trace, lookup, run_passes
from weft.passes.analysis.feed_forward import FeedForward, match_feed_forward
from weft.passes.core.equivalence import EXACT, EquivalenceCheck

from ..models import BATCH, SEQ, applied, count, weight, worst
from ..zoo import ZOO

HIDDEN = TensorType(dtypes.f32, (BATCH, SEQ, 6))
Gate = Callable[[Value, Value], Value]


def unit(gate: Gate, packed: bool = False, same: bool = True) -> Graph:
    """Two projections, of one value if `same`, and what `gate` makes of them."""
    g = Graph("unit")
    x, z = g.add_input("x", HIDDEN), g.add_input("z", HIDDEN)
    if packed:
        a, b = ops.split.emit(ops.linear(x, weight(g, "both", 18, 6), weight(g, "bias", 18)), sizes=(9, 9))
    else:
        a, b = ops.linear(x, weight(g, "gate", 9, 6)), ops.linear(x if same else z, weight(g, "up", 9, 6))
    y = ops.linear(gate(a, b), weight(g, "down", 6, 9))
    g.add_output("y", y if same else ops.add(y, ops.mul(z, y)))
    return g


def clamped(a: Value, b: Value) -> Value:
    """The gated unit of gpt-oss."""
    a, b = ops.clip(a, high=0.7), ops.clip(b, low=-0.7, high=0.7)
    return ops.mul(ops.affine(b, plus=1.0), ops.mul(a, ops.sigmoid(ops.affine(a, by=1.702))))


UNITS: dict[str, Gate] = {
    **{name: lambda a, b, name=name: ops.mul(activate(a, name), b) for name in ACTIVATIONS},
    "identity": ops.mul,
    "swish(1.3)": lambda a, b: ops.mul(b, ops.swish(a, beta=1.3)),
    "silu, spelled out": lambda a, b: ops.mul(ops.mul(ops.sigmoid(a), a), b),
    "relu2, spelled out": lambda a, b: ops.mul(b, ops.square(ops.relu(a))),
    "swish(1.702)": clamped,
}


@pytest.mark.parametrize("packed", [False, True], ids=["two linears", "split"])
@pytest.mark.parametrize("name", UNITS)
def test_gated_units_of_every_activation_are_recognized(name: str, packed: bool) -> None:
    before = unit(UNITS[name], packed)
    after = applied("fuse-glu", before)
    (glu,) = [n for n in after.nodes if n.op is ops.glu]
    assert glu.attrs["activation"] == name.partition(",")[0]
    assert (glu.attrs["limit"], glu.attrs["shift"]) == ((0.7, 1.0) if UNITS[name] is clamped else (None, 0.0))
    assert len(after) == 4 and worst(before, after) <= EXACT
    assert isinstance(match_feed_forward(list(after.nodes)[-1]), FeedForward)


def test_what_is_fused_is_packed_too() -> None:
    after = applied("fuse-glu, pack-gate-up", ZOO["variant/hand-written gate"]())
    assert count(after, "glu") == count(after, "split") == 2


def test_products_of_other_things_are_no_gated_units() -> None:
    trace = Trace()
    before = unit(UNITS["silu"], same=False)
    assert str(applied("fuse-glu", before, trace)) == str(before)
    assert "are not projections of the same value" in trace.refusals[0].reason
    for name in ("variant/gate", "variant/Mamba"):
        before, trace = ZOO[name](), Trace()
        assert str(applied("fuse-glu", before, trace)) == str(before) and len(trace.refusals) == 2
    own = Graph("silu")  # x σ(x) alone is an activation, not a unit of x with itself
    x = own.add_input("x", HIDDEN)
    y = ops.linear(x, weight(own, "w", 6, 6))
    own.add_output("y", ops.mul(y, ops.sigmoid(y)))
    assert str(applied("fuse-glu", own)) == str(own)


def test_a_gate_clamped_on_both_sides_is_another_one() -> None:
    def both(a: Value, b: Value) -> Value:
        return ops.mul(ops.swish(ops.clip(a, low=-0.7, high=0.7)), ops.clip(b, low=-0.7, high=0.7))

    before, trace = unit(both), Trace()
    assert str(applied("fuse-glu", before, trace)) == str(before) and "its clamps are not" in str(trace.refusals[0])
    wrong = unit(lambda a, b: ops.glu(a, b, limit=0.7))
    assert worst(before, wrong) > 0.01


def test_what_others_read_is_not_fused_away() -> None:
    before, trace = unit(UNITS["silu"]), Trace()
    before.add_output("opened", next(n.output for n in before.nodes if n.op is ops.swish))
    assert str(applied("fuse-glu", before, trace)) == str(before)
    assert "%swish is also read elsewhere" in trace.refusals[0].reason


# -- merge-shared-experts


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
def test_feed_forwards_side_by_side_become_one(parts: tuple[MLP | GatedMLP, ...], first: str) -> None:
    before = beside(*parts)
    after = applied(f"{first}merge-shared-experts", before)
    wide = [p for p in parts if not isinstance(p, MoE)]
    (found,) = [f for n in after.nodes if isinstance(f := match_feed_forward(n), FeedForward)]
    assert found.hidden == sum(p.hidden for p in wide) and worst(before, after) <= EXACT
    assert count(after, "moe") == len(parts) - len(wide)


def test_each_kind_is_merged_by_itself() -> None:
    before = beside(MLP(7, "gelu"), MLP(5, "relu"), MLP(3, "gelu"), MLP(2, "relu"), GatedMLP(4))
    trace = Trace()
    after = applied("merge-shared-experts", before, trace)
    found = [f for n in after.nodes if isinstance(f := match_feed_forward(n), FeedForward)]
    assert sorted((f.activation, f.hidden) for f in found) == [("gelu", 10), ("relu", 7), ("silu", 4)]
    assert worst(before, after) <= EXACT and len(trace.refusals) == 1


def test_norms_that_are_fused_into_linears() -> None:
    """Gates are seen through them; what would have to read the normed value is not."""
    fused = run_passes(ZOO["variant/hand-written gate"](), "fold-norm-scale, fuse-norm-linear")
    assert count(fused, "norm_linear") and count(applied("fuse-glu", fused), "glu") == 2
    relu = run_passes(fused, "replace-activation{to=relu}, permute-neurons, fold-scale", verify=True)
    assert count(relu, "glu") == 2
    trace = Trace()
    assert not count(applied("upcycle-to-moe{experts=3}", fused, trace), "moe")
    assert {r.reason for r in trace.refusals} == {"its norm is fused into it: run before fuse-norm-linear"}


def test_layers_that_are_applied_twice_merge_alike() -> None:
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
def test_what_is_not_one_feed_forward(
    parts: tuple[MLP | GatedMLP, ...], settings: dict[str, float], reason: str
) -> None:
    before, trace = beside(*parts, **settings), Trace()
    assert str(applied("merge-shared-experts", before, trace)) == str(before)
    assert trace.refusals and all(reason in r.reason for r in trace.refusals)


def test_a_gate_of_its_own_is_no_part_of_the_sum() -> None:
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


# -- upcycle-to-moe


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "name",
    ["family/gpt2-tied", "packed/family phi3", "variant/clamped gate", "packed/variant repeated", "family/bert"],
)
def test_copies_are_the_same_model(name: str, k: int) -> None:
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
        with pytest.raises(WeftError, match=r"upcycle-to-moe: top_k=\d and experts=\d+ must be from 1 to 1024"):
            applied(f"upcycle-to-moe{{{wrong}}}", before)


def test_names_of_upcycled_weights_are_those_of_experts() -> None:
    dense = Decoder(37, 18, 1, Block(Attention(3), GatedMLP(7, bias=True))).graph()
    mixture = Decoder(37, 18, 1, Block(Attention(3), MoE(4, 7, 2, bias=True))).graph()
    after = applied("upcycle-to-moe{experts=4}", dense)
    assert {n: p.type for n, p in after.params.items()} == {n: p.type for n, p in mixture.params.items()}


# -- permute-neurons


@pytest.mark.parametrize(
    "name", ["family/gpt2-untied", "family/gpt-oss", "packed/family bert", "packed/variant repeated", "family/mixtral"]
)
def test_another_order_is_the_same_model(name: str) -> None:
    before = ZOO[name]()
    after = applied("permute-neurons{seed=3}", before)
    assert any(isinstance(p.recipe, Shuffle) for p in after.params.values()) and worst(before, after) <= EXACT
    assert str(applied("permute-neurons{seed=3}", after)) == str(after)
    other = applied("permute-neurons{seed=4}", after)
    assert str(other) != str(after) and worst(before, other) <= EXACT


def test_the_order_of_one_side_only_is_another_model() -> None:
    before = ZOO["family/gpt2-untied"]()
    wrong = applied("permute-neurons", before)
    for name, p in wrong.params.items():
        if name.endswith("down.weight"):
            p.recipe = before.params[name].recipe
    assert worst(before, wrong) > 0.05


def test_all_weights_are_put_into_another_order_or_none() -> None:
    """Also where another pass has changed one of them since."""
    before = applied("permute-neurons, fold-norm-scale", ZOO["packed/variant tied"]())
    assert worst(before, applied("permute-neurons", before)) <= EXACT


def test_weights_with_another_reader_keep_their_order() -> None:
    before = unit(UNITS["silu"])
    before.add_output("other", ops.linear(before.inputs["z"], before.params["up"]))
    trace = Trace()
    assert str(applied("permute-neurons", before, trace)) == str(before)
    assert trace.refusals[0].reason == "its weights are also read by linear (%linear_4)"


# -- replace-activation


@pytest.mark.parametrize("to", [*ACTIVATIONS, "identity", "swish(0.7)"])
def test_equals_the_model_built_with_the_other_activation(to: str) -> None:
    """Of plain and gated feed-forwards and of experts, whose weights are drawn alike."""
    for feed in (MLP(7, "gelu", bias=True), GatedMLP(7, "silu", limit=1.2), MoE(4, 7, 2, "relu", gated=False)):
        before, wanted = (
            Decoder(37, 18, 2, Block(Attention(3), dataclasses.replace(feed, activation=name))).graph()
            for name in (feed.activation, to)
        )
        after = run_passes(before, f'replace-activation{{to="{to}"}}', verify=True)
        assert worst(wanted, after) <= EXACT
        assert to == feed.activation or worst(before, after) > 1e-4


def test_the_check_notices_another_activation() -> None:
    before = ZOO["packed/preset mixtral-8x7b"]()
    gelu, tanh = (applied(f"replace-activation{{to={name}}}", before) for name in ("gelu", "gelu_tanh"))
    lookup("replace-activation").make({"to": "gelu"}).check(before, gelu, EquivalenceCheck())
    with pytest.raises(WeftError, match="output logits differs"):
        lookup("replace-activation").make({"to": "gelu"}).check(before, tanh, EquivalenceCheck())


def test_gates_of_attention_and_poolers_stay() -> None:
    after = applied("replace-activation{to=relu}", ZOO["variant/gate"]())
    assert (
        count(after, "sigmoid") == 2 and [n.attrs["activation"] for n in after.nodes if n.op is ops.glu] == ["relu"] * 2
    )
    after = applied("replace-activation{to=relu}", ZOO["family/bert"]())
    assert count(after, "tanh") == 1 and count(after, "relu") == 3
    with pytest.raises(WeftError, match="unknown activation 'rellu'"):
        applied("replace-activation{to=rellu}", after)
