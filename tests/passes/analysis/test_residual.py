"""The residual stream, and the passes that map it as a whole: layernorm-to-rmsnorm, scale- and rotate-residual."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from weft.frontends.formats.hf.folder import load_folder
from weft.ir import Graph, Node, Param, TensorType, WeftError, interpret, ops
from weft.ir.recipes import Literal, Scale
from weft.ir.recipes.matrices import Centre, MatMul, RandomOrthogonal
from weft.ir.types import dtypes, sizes
from weft.passes import Trace, run_passes
from weft.passes.analysis.residual import ResidualStream, find_streams
from weft.passes.core.equivalence import EXACT, EquivalenceCheck
from weft.passes.edits.absorb import absorb_output_map, make_matrix_map, subtract_mean
from weft.passes.edits.edit import rebuild_node, replace_uses

from ...e2e.families import LENGTH, ROWS, VOCAB, error
from ..models import Tiny, applied, count, weight, worst
from ..zoo import ZOO

FOLD = "fold-norm-scale{untie=true}"


def ops_of(stream: ResidualStream) -> set[str]:
    return {w.op.name if isinstance(w, Node) else "parameter" for w in stream.writers}


# -- the analysis


@pytest.mark.parametrize(
    ("name", "found", "writers"),
    [
        ("family/llama-gqa-tied", 1, {"embedding", "linear"}),
        ("family/gpt2-tied", 1, {"embedding", "linear"}),  # tokens and positions
        ("family/mixtral", 1, {"embedding", "linear", "moe"}),
        ("family/qwen2-moe", 1, {"embedding", "linear", "moe"}),  # with a gate on the shared expert
        ("family/granite", 1, {"embedding", "linear"}),  # with multipliers
        ("family/mamba", 1, {"embedding", "linear"}),
        ("family/gemma2", 1, {"embedding", "rms_norm"}),
        ("family/t5", 2, {"embedding", "linear"}),
        ("family/bert", 7, {"embedding"}),  # the sum of embeddings, then one for every norm
        ("packed/family bert", 7, {"embedding"}),
        ("packed/family llama-mha-biases", 1, {"embedding", "linear"}),
        ("cached/variant hybrid", 1, {"embedding", "linear"}),
    ],
)
def test_streams_of_families(name: str, found: int, writers: set[str]) -> None:
    every = find_streams(ZOO[name]())
    assert len(every) == found and ops_of(every[0]) == writers
    assert not any(s.obstacles for s in every[:-1])


def test_what_a_stream_meets() -> None:
    """A parameter that is added, rows that are weighed and moved, a linear and a softmax that read it."""
    g = Graph("stream")
    x = g.add_input("x", TensorType(dtypes.f32, (sizes.sym("n"), 3, 6)))
    start = ops.add(ops.linear(x, weight(g, "in.weight", 6, 6), name="in"), weight(g, "positions", 3, 6))
    gate = ops.sigmoid(ops.linear(x, weight(g, "gate.weight", 1, 6)))
    total = ops.add(start, ops.mul(gate, ops.linear(x, weight(g, "out.weight", 6, 6), name="out")), name="total")
    last = ops.slice_(ops.affine(total, by=0.5), axis=1, start=2, stop=3)
    g.add_output("y", ops.linear(ops.rms_norm(last), weight(g, "head.weight", 5, 6)))
    g.add_output("z", ops.softmax(total, name="soft"))
    g.add_output("w", ops.linear(total, weight(g, "direct.weight", 5, 6), name="direct"))
    (stream,) = find_streams(g)
    writers = {w.name if isinstance(w, Param) else w.output.name for w in stream.writers}
    assert writers == {"in", "positions", "out"}
    assert [n.op.name for n in stream.norms] == ["rms_norm"] and [n.output.name for n in stream.linears] == ["direct"]
    assert stream.obstacles == ["%total is read by softmax (%soft)"]


# -- LayerNorm to RMSNorm


@pytest.mark.parametrize(
    "before", ["dce", "pack-qkv, pack-gate-up, fuse-residual-norm", "fuse-norm-linear{untie=true}"]
)
@pytest.mark.parametrize(
    "name",
    ["family/gpt2-tied", "family/gpt2-untied", "family/opt", "family/stablelm", "family/pegasus", "variant/gpt2"],
)
def test_pre_norm_models_become_rms(name: str, before: str) -> None:
    graph = applied(before, ZOO[name]())
    after = applied("layernorm-to-rmsnorm", graph)
    assert count(after, "layer_norm") == 0 and not any(n.attrs.get("kind") == "layer" for n in after.nodes)
    assert worst(graph, after) <= EXACT


def test_writers_are_centred_and_shifts_go_on() -> None:
    after = applied("layernorm-to-rmsnorm", ZOO["family/gpt2-untied"]())
    centred_params = {n for n, p in after.params.items() if isinstance(p.recipe, Centre)}
    layers = {f"layers.{i}.{n}.{p}" for i in range(3) for n in ("attn.o", "ffn.down") for p in ("weight", "bias")}
    assert centred_params == {"embed.weight", "positions.weight"} | layers
    assert all(len(n.inputs) == 2 for n in after.nodes if n.op is ops.rms_norm)
    head = next(n for n in after.nodes if n.output.name == "lm_head")
    assert head.operand("bias") is not None and "add" in {n.op.name for n in after.nodes}


def test_a_shift_that_no_linear_takes_is_added() -> None:
    graph = ZOO["variant/encoder, pre-norm"]()
    after = applied("layernorm-to-rmsnorm", graph)
    assert after.outputs["last_hidden_state"].producer is not None
    assert after.outputs["last_hidden_state"].producer.op is ops.add and worst(graph, after) <= EXACT


def test_tied_heads() -> None:
    """A tied table stays as it is if the head reads a weight or bias that is not centred; else both are centred."""
    after = applied("layernorm-to-rmsnorm", ZOO["family/gpt2-tied"]())
    assert after.params["embed.weight"].recipe == ZOO["family/gpt2-tied"]().params["embed.weight"].recipe
    assert count(after, "mean") == 1
    plain = ZOO["family/olmo-clipped"]()  # tied, and its norms have no parameters
    after = applied("layernorm-to-rmsnorm", plain)
    assert {n.op.name for n in after.params["embed.weight"].users} == {"embedding", "linear"}
    assert isinstance(after.params["embed.weight"].recipe, Centre) and count(after, "mean") == 0
    assert worst(plain, after) <= EXACT


def test_a_converted_gpt2_equals_transformers(tmp_path: Path) -> None:
    model = ROWS["gpt2-tied"].save(tmp_path)
    graph = run_passes(load_folder(tmp_path)[1].graph, f"{FOLD}, layernorm-to-rmsnorm, rotate-residual")
    assert count(graph, "layer_norm") == 0
    ids = np.random.default_rng(1).integers(3, VOCAB, (2, LENGTH))
    got = interpret(graph, {"input_ids": ids, "position_ids": np.tile(np.arange(LENGTH), (2, 1))})["logits"]
    with torch.inference_mode():
        want = model.double()(torch.from_numpy(ids)).logits.numpy()
    assert error(got, want) < 1e-5  # weights are float32


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("family/bert", "%embed_norm is made by layer_norm, a norm whose result is part of the residual"),
        ("packed/family bert", "%embed_norm is made by add_norm, a norm whose result is part of the residual"),
        ("family/bloom", "%embed_norm is made by layer_norm, .* part of the residual; run fold-embedding-norm before"),
        ("family/albert", r"linear \(%layers.0.block.attn.q\) reads its mean"),
        ("family/opt-post", r"linear \(%layers.0.attn.q\) reads its mean"),
    ],
)
def test_post_norm_models_stay(name: str, reason: str) -> None:
    with pytest.raises(WeftError, match=f"layernorm-to-rmsnorm: the residual stream cannot be changed: {reason}"):
        applied("layernorm-to-rmsnorm", ZOO[name]())


def as_rms(graph: Graph) -> Graph:
    """Apply layernorm-to-rmsnorm without its conditions: centre all writers, subtract no mean anywhere."""
    wrong = graph.clone()
    for stream in find_streams(wrong):
        for writer in stream.writers:
            if isinstance(writer, Node) and writer.op in (ops.linear, ops.embedding):
                absorb_output_map(writer, subtract_mean)
    for norm in [n for n in wrong.nodes if n.op is ops.layer_norm]:
        with wrong.inserting(before=norm):
            y = ops.rms_norm(norm.inputs[0], norm.operand("weight"), eps=norm.attrs["eps"])
            y = ops.add(y, norm.operand("bias"))
        replace_uses(norm.output, y)
        wrong.erase(norm)
    return wrong


@pytest.mark.parametrize("name", ["family/bert", "family/albert", "family/opt-post", "family/bloom"])
def test_why_post_norm_models_stay(name: str) -> None:
    graph = ZOO[name]()
    assert worst(graph, as_rms(graph)) > 1e-2


def test_other_readers_stand_in_the_way() -> None:
    def model(reader: str) -> Graph:
        g = Graph("mixed")
        x = g.add_input("x", TensorType(dtypes.f32, (sizes.sym("n"), 3, 6)))
        h = ops.linear(x, weight(g, "in.weight", 6, 6))
        total = ops.add(h, ops.linear(ops.layer_norm(h), weight(g, "ffn.weight", 6, 6)), name="total")
        read = {"rms": ops.rms_norm, "linear": lambda v: v, "output": lambda v: v}[reader](total)
        g.add_output("y", read if reader == "output" else ops.linear(read, weight(g, "head.weight", 5, 6), name="head"))
        return g

    for reader, reason in {
        "rms": r"rms_norm \(%rms_norm\) reads its mean",
        "linear": r"linear \(%head\) reads its mean",
        "output": "%total is an output of the graph",
    }.items():
        with pytest.raises(WeftError, match=reason):
            applied("layernorm-to-rmsnorm", model(reader))
        wrong = model(reader)
        (stream,) = find_streams(wrong)
        for writer in stream.writers:
            assert isinstance(writer, Node)
            absorb_output_map(writer, subtract_mean)
        assert worst(model(reader), wrong) > 1e-2


# -- the scale


@pytest.mark.parametrize("factor", ["0.125", "0.3", "1e-4"])
@pytest.mark.parametrize(
    "name",
    [
        *("family/t5-v1.1", "family/gemma2", "family/gpt2-tied", "family/bert", "family/albert", "family/qwen2-moe"),
        *("packed/family t5-v1.1", "cached/variant hybrid", "variant/norms without weights", "variant/repeated"),
    ],
)
def test_scaled_streams_compute_the_same(name: str, factor: str) -> None:
    graph = ZOO[name]()
    after = applied(f"scale-residual-stream{{factor={factor}}}", graph)
    assert worst(graph, after) <= EXACT
    again = applied(f"scale-residual-stream{{factor={factor}}}", after)
    assert again == after and after.meta["residual_scale"] == float(factor)


def largest(graph: Graph, op: str = "add") -> float:
    """The largest number of the sums that `graph` makes."""
    found = [0.0]
    equivalence = EquivalenceCheck()

    def watch(node: Node, arrays: tuple[np.ndarray, ...]) -> None:
        if node.op.name == op:
            found.append(float(np.abs(arrays[0]).max()))

    interpret(equivalence.randomize_weights(graph), equivalence.make_inputs(graph), watch=watch)
    return max(found)


def test_what_overflows_in_half_precision_fits_after_it() -> None:
    g = applied("scale-residual-stream{factor=131072}", Tiny().graph())  # a stream as T5's, at the border of f16
    del g.meta["residual_scale"]
    assert largest(g) > 65504
    after = applied("scale-residual-stream{factor=0.0009765625}", g)
    assert largest(after) == pytest.approx(largest(g) / 1024) and worst(g, after) <= EXACT


def test_eps_must_be_scaled_too() -> None:
    before = Tiny().graph()
    wrong = applied("scale-residual-stream{factor=0.01}", before)
    for node in wrong.nodes:
        if node.op is ops.rms_norm:
            rebuild_node(node, eps=1e-5)
    assert worst(before, wrong) > 1e-4


def test_a_second_factor_takes_the_place_of_the_first() -> None:
    before = Tiny(norm="layer").graph()
    after = applied("scale-residual-stream{factor=4.0}, scale-residual-stream{factor=0.5}", before)
    once = applied("scale-residual-stream{factor=0.5}", before)
    for name, param in after.params.items():
        same = param.recipe.evaluate(after.reader), once.params[name].recipe.evaluate(once.reader)
        np.testing.assert_array_equal(*same)
    assert worst(before, after) <= EXACT


def test_scaling_refuses() -> None:
    for factor in ("0", "-1.0"):
        with pytest.raises(WeftError, match=r"scale-residual-stream: factor=.* must be from 1e-06 to 1e\+06"):
            applied(f"scale-residual-stream{{factor={factor}}}", Tiny().graph())
    with pytest.raises(WeftError, match="is an output of the graph"):
        applied("scale-residual-stream{factor=2.0}", ZOO["variant/encoder, ALiBi"]())
    g = Graph("flat")
    x = g.add_input("x", TensorType(dtypes.f32, (sizes.sym("n"), 3, 6)))
    g.add_output("y", ops.rms_norm(x))
    with pytest.raises(WeftError, match="graph flat has no residual stream: no norm reads a sum of two values"):
        applied("scale-residual-stream{factor=2.0}", g)


# -- the rotation


@pytest.mark.parametrize(
    "name",
    [
        *(
            "family/llama-gqa-tied",
            "family/mixtral",
            "family/gpt-oss",
            "family/mamba",
            "family/jamba",
            "family/t5-v1.1",
        ),
        *("packed/family llama-mha-biases", "cached/family mistral-gqa", "variant/repeated", "quantized/gguf"),
    ],
)
def test_rotated_models_compute_the_same(name: str) -> None:
    graph = ZOO[name]()
    after = applied(f"{FOLD}, rotate-residual{{seed=5}}", graph)
    assert worst(graph, after) <= EXACT
    trace = Trace()
    assert applied("rotate-residual", after, trace) == after
    assert [refused.reason for refused in trace.refusals] == ["the residual stream is rotated already"]


def test_layer_norms_rotate_once_they_are_rms() -> None:
    graph = ZOO["family/gpt2-untied"]()
    after = applied(f"fuse-norm-linear, layernorm-to-rmsnorm, {FOLD}, rotate-residual", graph)
    assert worst(graph, after) <= EXACT and count(after, "norm_linear") == 13


def test_a_tied_table_without_norm_weights_stays_tied() -> None:
    graph = applied("layernorm-to-rmsnorm", ZOO["family/olmo-clipped"]())
    after = applied("rotate-residual", graph)
    table = after.params["embed.weight"]
    assert isinstance(table.recipe, MatMul) and len(table.users) == 2 and worst(graph, after) <= EXACT


def test_outliers_are_spread() -> None:
    """One place of the stream with large numbers, as trained models have: the largest of a row comes near the rest."""
    graph = applied(FOLD, Tiny(dim=16).graph())
    spike = [50.0 if i == 3 else 1.0 for i in range(16)]
    for stream in find_streams(graph):
        for writer in stream.writers:
            assert isinstance(writer, Node)
            absorb_output_map(writer, lambda r, axis, rank: Scale(r, Literal.from_array(spike), axis))
    after = applied("rotate-residual", graph)

    def peak(g: Graph) -> float:
        rows = g.params["embed.weight"].recipe.evaluate(g.reader)
        return float(np.mean(np.abs(rows).max(1) / np.sqrt(np.square(rows).mean(1))))

    assert peak(graph) > 3.5 and peak(after) < 1.5 and worst(graph, after) <= EXACT


def test_weights_of_norms_do_not_commute_with_it() -> None:
    before = Tiny().graph()
    with pytest.raises(WeftError, match=r"%layers.0.mlp_norm has a weight; run fold-norm-scale\{untie=true\} before"):
        applied("rotate-residual", before)
    wrong = before.clone()
    (stream,) = find_streams(wrong)
    turn = make_matrix_map(RandomOrthogonal(18))
    for writer in stream.writers:
        assert isinstance(writer, Node)
        absorb_output_map(writer, turn)
    for norm in stream.norms:
        for reader, _ in norm.output.uses:
            w = reader.inputs[1]
            assert isinstance(w, Param)
            w.recipe = turn(w.recipe, 1, 2)
    assert worst(before, wrong) > 1e-2


@pytest.mark.parametrize(
    ("name", "before", "reason"),
    [
        ("family/olmo", "dce", "%layers.0.ffn_norm subtracts the mean; run layernorm-to-rmsnorm before"),
        (
            "family/gemma2",
            FOLD,
            "%layers.0.attn_post_norm is made by rms_norm, a norm whose result is part of the residual",
        ),
        ("variant/encoder, pre-norm", f"{FOLD}, layernorm-to-rmsnorm", "%final_norm has a weight; run fold-norm-scale"),
        ("variant/encoder, ALiBi", FOLD, "is an output of the graph"),
    ],
)
def test_what_cannot_be_rotated(name: str, before: str, reason: str) -> None:
    with pytest.raises(WeftError, match=reason):
        applied(f"{before}, rotate-residual", ZOO[name]())
