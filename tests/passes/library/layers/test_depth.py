"""prune-layers and insert-layers: which layers are there, what they are called, and what they compute."""

from __future__ import annotations

import numpy as np
import pytest

from weft.frontends.dsl import (
    MLP,
    Attention,
    Block,
    Decoder,
    GatedMLP,
    LayerNorm,
    LearnedPositions,
    MoE,
    RMSNorm,
    RoPE,
    Router,
)
from weft.ir import Graph, Param, TensorType, WeftError, interpret, ops
from weft.ir.recipes import Full, Normal
from weft.ir.types import dtypes
from weft.passes import Trace, lookup, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference

from ...models import BATCH, SEQ, applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

ATTENTION = Attention(3, rope=RoPE())
FUSED = "pack-qkv, pack-gate-up, fuse-residual-norm"


def deep(*hidden: int, **settings: object) -> Graph:
    """A decoder whose layers are told apart by the width of their feed-forwards."""
    blocks = [Block(ATTENTION, GatedMLP(n)) for n in hidden]
    return Decoder(37, 18, blocks, **settings).graph()


def same_as(built: Graph, rewritten: Graph, layers: dict[int, int]) -> float:
    """Return the difference of `rewritten` from `built` with its weights, layer i of built being layer layers[i]."""
    equivalence = EquivalenceCheck()
    inputs = equivalence.make_inputs(built)
    staged = equivalence.randomize_weights(rewritten)
    arrays = {name: p.recipe.evaluate(staged.reader) for name, p in staged.params.items()}

    def named(name: str) -> str:
        first, number, *rest = (*name.split(".", 2), "", "")[:3]
        return f"layers.{layers[int(number)]}.{rest[0]}" if first == "layers" else name

    params = {name: arrays[named(name)] for name in built.params}
    a, b = interpret(built, inputs, params=params), interpret(staged, inputs)
    return measure_difference(a["logits"], b["logits"])


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize(
    ("layers", "left"),
    [("[1]", [5, 9, 11]), ("-1", [5, 7, 9]), ("even", [7, 11]), ('"0-2"', [11]), ("[3, 0]", [7, 9])],
)
def test_layers_that_are_left_are_numbered_anew(layers: str, left: list[int]) -> None:
    before = deep(5, 7, 9, 11)
    after = applied(f"prune-layers{{layers={layers}}}", before)
    built = deep(*left)
    assert {n: p.type for n, p in after.params.items()} == {n: p.type for n, p in built.params.items()}
    assert [(n.scope, n.op.name) for n in after.nodes] == [(n.scope, n.op.name) for n in built.nodes]
    kept = [i for i, n in enumerate((5, 7, 9, 11)) if n in left]
    pruned = {f"layers.{j}." for j in range(4) if j not in kept}
    streams = {p.recipe.stream for p in after.params.values() if p.recipe.name == "normal"}
    assert not any(s.startswith(tuple(pruned)) for s in streams)
    arrays = {n: p.recipe.evaluate(before.reader) for n, p in before.params.items()}
    numbers = dict(enumerate(kept))
    given = {
        n: arrays[n.replace(n[:9], f"layers.{numbers[int(n[7])]}.", 1) if n.startswith("layers.") else n]
        for n in built.params
    }
    inputs = EquivalenceCheck().make_inputs(built)
    assert (
        measure_difference(interpret(built, inputs, params=given)["logits"], interpret(after, inputs)["logits"])
        <= EXACT
    )


@pytest.mark.parametrize("first", ["", FUSED])
def test_fused_layers_and_caches(first: str) -> None:
    before = run_passes(deep(5, 7, 9), first)
    after = run_passes(before, "prune-layers{layers=[1]}, kv-cache", verify=True)
    assert [n for n in after.inputs if n.endswith(".key")] == ["past_key_values.0.key", "past_key_values.1.key"]
    assert count(after, "add_norm") == (4 if first else 0)
    assert same_as(run_passes(deep(5, 9), first), run_passes(before, "prune-layers{layers=[1]}"), {0: 0, 1: 1}) <= EXACT


def test_first_layer_after_added_positions_can_be_pruned() -> None:
    block = Block(Attention(3), MLP(9), LayerNorm())
    model = Decoder(37, 18, 3, block, positions=LearnedPositions(19))
    for pipeline in ("prune-layers{layers=[0]}", f"{FUSED}, prune-layers{{layers=[0, 1]}}"):
        run_passes(model.graph(), pipeline, verify=True)


def test_values_read_by_pruned_layers_only_are_removed() -> None:
    local, wide = (Block(Attention(3, rope=RoPE(theta)), GatedMLP(7)) for theta in (1e4, 1e6))
    before = Decoder(37, 18, [local, wide, local]).graph()
    after = applied("prune-layers{layers=[1]}", before)
    assert sum("frequencies" in name for name in before.params) == 2
    assert sum("frequencies" in name for name in after.params) == 1


def test_the_check_notices_other_layers() -> None:
    before = deep(5, 7, 9)
    pruned = applied("prune-layers{layers=[1]}", before)
    lookup("prune-layers").make({"layers": 1}).check(before, pruned, EquivalenceCheck())
    with pytest.raises(WeftError, match="output logits differs"):
        lookup("prune-layers").make({"layers": 2}).check(before, pruned, EquivalenceCheck())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prune-layers{layers=[3]}", "prune-layers: there is no layer 3; the graph has layers 0 to 2"),
        ("prune-layers{layers=all}", "prune-layers: all layers of layers would be removed; keep one"),
        ("prune-layers{layers=first}", "prune-layers: cannot read 'first'"),
        ("prune-layers{layers=[0], stack=encoder}", "prune-layers: stack=encoder must be one of layers"),
        ("insert-layers{after=3}", "insert-layers: there is no layer 3; layers has 0 to 2"),
        ("insert-layers{after=0, count=0}", "insert-layers: count=0 must be from 1 to 1024"),
        ("insert-layers{after=0, count=1000000000000}", "insert-layers: count=1000000000000 must be from 1 to"),
        ("kv-cache, prune-layers{layers=[0]}", "has caches already; run prune-layers before kv-cache"),
    ],
)
def test_invalid_layers_are_refused(text: str, reason: str) -> None:
    with pytest.raises(WeftError) as e:
        applied(text, deep(5, 7, 9))
    assert reason in str(e.value)


def test_layers_with_two_results() -> None:
    model = Decoder(37, 18, 2, Block(ATTENTION, MoE(4, 5, 2, router=Router(aux_loss=0.1))))
    with pytest.raises(WeftError, match=r"layers.0 returns .*weighted_loss.*, but a layer must return one value"):
        applied("prune-layers{layers=[0]}", model.graph())
    with pytest.raises(WeftError, match="has no layers, which are scopes"):
        applied("prune-layers{layers=[0]}", ZOO["variant/norms without weights"]().__class__("empty"))


def test_stacks_of_an_encoder_and_a_decoder() -> None:
    before = ZOO["family/bart"]()
    after = run_passes(before, "prune-layers{layers=[0], stack=encoder.layers}", verify=True)
    assert not any(n.startswith("encoder.layers.1.") for n in after.params)
    assert sum(n.startswith("decoder.layers.") for n in after.params) == sum(
        n.startswith("decoder.layers.") for n in before.params
    )


# -- insert-layers


@pytest.mark.parametrize("first", ["", FUSED])
@pytest.mark.parametrize(
    "block",
    [
        Block(ATTENTION, GatedMLP(7)),
        Block(Attention(3, out_bias=True), MLP(7, bias=True), LayerNorm(), "sandwich"),
        Block(ATTENTION, MoE(4, 5, 2, bias=True, shared=GatedMLP(3), shared_gate=True), arrangement="post_sublayer"),
        Block(ATTENTION, GatedMLP(7), arrangement="parallel", residual_scale=0.3),
    ],
    ids=["pre", "sandwich", "post_sublayer", "parallel"],
)
def test_inserted_layers_change_nothing(block: Block, first: str) -> None:
    before = run_passes(Decoder(37, 18, 3, block).graph(), first)
    after = run_passes(before, "insert-layers{after=1, count=2}", verify=True)
    assert worst(before, after) <= EXACT
    layers = sorted({n.split(".")[1] for n in after.params if n.startswith("layers.")})
    assert layers == ["0", "1", "2", "3", "4"]
    for name, p in before.params.items():  # the layer behind moved, the copies have what their original has
        assert not name.startswith("layers.2.") or after.params[name.replace("2", "4", 1)].recipe == p.recipe
        for copy in ("2", "3") if name.startswith("layers.1.") else ():
            made = after.params[name.replace("1", copy, 1)].recipe
            zero = made == Full(0.0, p.type.concrete({}))
            assert (made == p.recipe) != zero or p.recipe == made
    assert len(after.params) == len(before.params) + 2 * sum(n.startswith("layers.1.") for n in before.params)
    trained = after.clone()  # as soon as the zeros are not, the model is another
    for p in trained.params.values():
        p.recipe = Full(0.01, p.recipe.dims) if p.recipe == Full(0.0, p.type.concrete({})) else p.recipe
    assert worst(before, trained) > 1e-4


def test_only_what_ends_a_branch_is_zero() -> None:
    after = applied("insert-layers{after=0}", deep(5, 7))
    zero = {n for n, p in after.params.items() if isinstance(p.recipe, Full) and p.recipe.value == 0}
    assert zero == {"layers.1.attn.o.weight", "layers.1.ffn.down.weight"}
    again = Trace()
    assert str(applied("insert-layers{after=0}", after, again)) == str(after)
    assert again.refusals[0].reason == "layers.1, after it, already adds zero"


def test_post_norm_layers_cannot_be_identities() -> None:
    before, trace = Decoder(37, 18, 2, Block(ATTENTION, GatedMLP(7), RMSNorm(), "post")).graph(), Trace()
    assert str(applied("insert-layers{after=0}", before, trace)) == str(before)
    assert trace.refusals[0].reason == "it comes from rms_norm: not a sum of %embed and outputs of sublayers"
    wrong = Decoder(37, 18, 3, Block(ATTENTION, GatedMLP(7), RMSNorm(), "post")).graph()
    silent = wrong.clone()
    for name, p in (*before.params.items(), *silent.params.items()):
        if name.endswith("norm.weight"):
            p.recipe = Normal((18,), 0.3, name, mean=1.0)
    for name, p in silent.params.items():
        if name.startswith("layers.1.") and name.endswith(("o.weight", "down.weight")):
            p.recipe = Full(0.0, p.type.concrete({}))
        if name.startswith("layers.2."):
            p.recipe = before.params[name.replace("2", "1", 1)].recipe
    assert worst(before, silent) > 0.01  # norm(x + 0) is not x


def test_inserted_layers_get_caches_and_can_be_pruned() -> None:
    before = deep(5, 7, 9)
    after = run_passes(before, "insert-layers{after=-1}, kv-cache", verify=True)
    assert sum(n.endswith(".key") for n in after.inputs) == 4
    back = run_passes(before, "insert-layers{after=1, count=2}, prune-layers{layers=[2, 3]}")
    assert worst(before, back) <= EXACT and list(back.params) == list(before.params)
    inputs = EquivalenceCheck().make_inputs(before)
    np.testing.assert_array_equal(interpret(back, inputs)["logits"], interpret(before, inputs)["logits"])


def test_scaled_branches_get_zero_weights_before_the_scale() -> None:
    g = Graph("scaled")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 6)))
    for i in range(2):
        with g.scope(f"layers.{i}"):
            y = ops.linear(ops.relu(ops.linear(x, weight(g, "up", 9, 6))), weight(g, "w", 6, 9), name="down")
            x = ops.add(x, ops.mul(weight(g, "scale", 6), y), name="sum")
    g.add_output("y", x)
    after = run_passes(g, "insert-layers{after=0}", verify=True)
    assert after.params["layers.1.w"].recipe == Full(0.0, (6, 9))
    assert after.params["layers.1.scale"].recipe == g.params["layers.0.scale"].recipe
    for n in g.nodes:  # and what is not linear at its end cannot be silenced
        if n.output.name == "layers.0.down":
            with g.inserting(after=n):
                bent = ops.exp(n.output)
            n.output.replace_uses(bent, keep=[bent.producer])
    trace = Trace()
    assert str(applied("insert-layers{after=0}", g, trace)) == str(g)
    assert "exp (%layers.0.exp) is added to the residual stream, not the output of a linear" in trace.refusals[0].reason


@pytest.mark.parametrize("layers", ["[0]", "[1]", "[0, 2]"])
def test_layers_with_alternating_shared_weights(layers: str) -> None:
    """A weight stays as long as one of its layers does, and is not taken for that of another."""
    g = Graph("turns")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 6)))
    known: dict[int, Param] = {}
    for i in range(4):
        with g.scope(f"layers.{i}"):
            if i < 2:
                known[i] = weight(g, "w", 6, 6)
            x = ops.add(x, ops.relu(ops.linear(x, known[i % 2], name="up")), name="sum")
    g.add_output("y", x)
    after = run_passes(g, f"prune-layers{{layers={layers}}}", verify=True)
    streams = {i: p.recipe.stream for i, p in known.items()}
    used = [n.inputs[1].recipe.stream for n in after.nodes if n.op is ops.linear]
    assert used == [streams[i % 2] for i in range(4) if str(i) not in layers]
    assert len(after.params) == len(set(used))
