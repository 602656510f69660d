"""prune-heads: which heads go, and that nothing but what they add goes with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weft.ir import Graph, Node, Param, TensorType, WeftError, interpret, ops
from weft.ir.recipes import Literal, Scale, Take
from weft.ir.types import dtypes
from weft.passes import Trace, run_passes
from weft.passes.core.equivalence import EXACT, EquivalenceCheck, measure_difference

from ...models import BATCH, SEQ, Tiny, applied, weight
from ...rewrites import Rewrite, rewrites

MODELS = {
    "groups": Tiny(heads=8, kv_heads=4, bias="q k v"),
    "norms of heads": Tiny(kv_heads=3, qk_norm=True),
    "no rope": Tiny(kv_heads=3, rope=False, norm="layer"),
}


def attentions(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op is ops.attention]


def output_weight(graph: Graph, layer: int) -> Param:
    return graph.params[f"layers.{layer}.attn.o.weight"]


def silenced(graph: Graph, layer: int, gone: list[int]) -> None:
    """Let the KV heads `gone` of a staged graph add nothing."""
    o, node = output_weight(graph, layer), attentions(graph)[layer]
    heard = np.repeat([h not in gone for h in range(node.attrs["kv_heads"])], o.width // node.attrs["kv_heads"])
    o.recipe = Scale(o.recipe, Literal.from_array(heard.astype(float)), axis=1)


def energies(graph: Graph, layer: int, ids: np.ndarray) -> np.ndarray:
    """E‖O_h y_h‖² of each KV head, one query head after the other."""
    (node, weights), found = (attentions(graph)[layer], output_weight(graph, layer)), []
    watched = graph.clone()
    watched.outputs.clear()
    watched.add_output("y", attentions(watched)[layer].output)
    feeds = {n: ids if n == "input_ids" else np.broadcast_to(np.arange(ids.shape[1]), ids.shape) for n in graph.inputs}
    y, o = interpret(watched, feeds)["y"], weights.recipe.evaluate(graph.reader)
    heads = node.attrs["heads"]
    for own, columns in zip(np.split(y, heads, axis=2), np.split(o, heads, axis=1), strict=True):
        found.append(((own @ columns.T) ** 2).sum())
    return np.array(found).reshape(node.attrs["kv_heads"], -1).sum(1)


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("packing", ["dce", "pack-qkv, fuse-residual-norm"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_heads_without_output_are_pruned_without_loss(model: Tiny, packing: str) -> None:
    graph = EquivalenceCheck().randomize_weights(applied(packing, model.graph()))
    silenced(graph, 0, [1])
    silenced(graph, 1, [0])
    inputs = EquivalenceCheck().make_inputs(graph)
    want = interpret(graph, inputs)["logits"]
    pruned = run_passes(graph, "prune-heads", verify=True)
    assert measure_difference(want, interpret(pruned, inputs)["logits"]) <= EXACT
    run, kv_heads = model.heads // model.kv_heads, model.kv_heads - 1
    for node in attentions(pruned):
        assert (node.attrs["heads"], node.attrs["kv_heads"]) == (run * kv_heads, kv_heads)
    assert output_weight(pruned, 0).shape == (model.dim, run * kv_heads * model.head_dim)
    wrong = applied("prune-heads{heads=[2]}", graph)
    assert measure_difference(want, interpret(wrong, inputs)["logits"]) > 0.01


def test_heads_with_least_output_on_a_text_are_pruned(tmp_path: Path) -> None:
    ids = np.random.default_rng(2).integers(0, 37, (3, 9))
    text = tmp_path / "ids.json"
    text.write_text(json.dumps(ids.tolist()))
    graph = EquivalenceCheck(7).randomize_weights(MODELS["groups"].graph())
    pruned = applied(f"prune-heads{{count=2, calibration={json.dumps(str(text))}}}", graph)
    for layer in range(2):
        found = output_weight(pruned, layer).recipe
        assert isinstance(found, Take)
        kept = sorted({i // 8 for i in found.indices})
        assert kept == sorted(np.argsort(energies(graph, layer, ids))[2:].tolist())


def test_sinks_and_biases_of_heads_go_with_them() -> None:
    g = Graph("biased")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 10)))
    q, k, v = (ops.linear(x, weight(g, f"{r}.weight", n * 4, 10)) for r, n in (("q", 6), ("k", 3), ("v", 3)))
    at = g.add_input("position_ids", TensorType(dtypes.i64, (BATCH, SEQ)))
    bias = ops.alibi(weight(g, "slopes", 6), at, at)
    y = ops.attention(q, k, v, bias, None, weight(g, "sinks", 6), heads=6, kv_heads=3, causal=True)
    g.add_output("o", ops.linear(y, weight(g, "o.weight", 10, 24)))
    pruned = run_passes(g, "prune-heads{heads=[0, 2]}", verify=True)
    (node,) = attentions(pruned)
    sinks, made = node.operand("sinks"), node.operand("bias")
    assert isinstance(sinks, Param) and sinks.recipe == Take(g.params["sinks"].recipe, (2, 3))
    assert made is not None and made.producer is not None and made.producer.operand("slopes").shape == (2,)
    assert len(pruned.params) == len(g.params)


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        ("prune-heads{count=2}", Tiny(), "all KV heads of .* would be removed"),
        ("prune-heads{heads=[0, 1]}", Tiny(), "all KV heads of .* would be removed"),
        ("prune-heads{heads=[2]}", Tiny(), r"heads=\[2\] is out of range: .* are 0 to 1"),
        ("prune-heads{count=0}", Tiny(), "must both be positive"),
        ("prune-heads{heads=[0], count=2}", Tiny(), "leave out count= and calibration="),
        ("kv-cache, prune-heads", Tiny(), "run prune-heads before kv-cache"),
    ],
)
def test_invalid_arguments_are_refused(text: str, model: Tiny, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        applied(text, model.graph())


def test_norm_over_all_heads_is_refused() -> None:
    """Removing a head changes the mean of squares over the others, hence the refusal."""
    g = Graph("normed")
    x = g.add_input("x", TensorType(dtypes.f32, (BATCH, SEQ, 10)))
    q, k, v = (ops.linear(x, weight(g, f"{r}.weight", 12, 10)) for r in "qkv")
    q = ops.rms_norm(q, weight(g, "q_norm", 12))
    g.add_output("o", ops.linear(ops.attention(q, k, v, heads=3, kv_heads=3), weight(g, "o.weight", 10, 12)))
    trace = Trace()
    assert applied("prune-heads{heads=[1]}", g, trace) == g
    assert [r.reason for r in trace.refusals] == ["rms_norm (%rms_norm) takes the mean over all heads"]
    numbers = np.random.default_rng(0).standard_normal((1, 12))
    rest = np.delete(numbers, range(4, 8), axis=1)
    alone, among = rest / np.sqrt((rest**2).mean()), rest / np.sqrt((numbers**2).mean())
    assert measure_difference(among, alone) > 0.05
