"""layernorm-to-rmsnorm: writers of the residual stream are centred, LayerNorms become RMSNorms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from weft.frontends.formats.hf.folder import load_folder
from weft.ir import Graph, Node, TensorType, WeftError, interpret, ops
from weft.ir.recipes.matrices import Centre
from weft.ir.types import dtypes, sizes
from weft.passes import run_passes
from weft.passes.analysis.residual import find_streams
from weft.passes.core.equivalence import EXACT
from weft.passes.edits.absorb import absorb_output_map, subtract_mean
from weft.passes.edits.edit import replace_uses

from ....e2e.families import LENGTH, ROWS, VOCAB, error
from ...models import applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

FOLD = "fold-norm-scale{untie=true}"


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


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


def test_writers_are_centred_and_norm_biases_move_into_linears() -> None:
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


def test_tied_tables_are_centred_or_the_mean_is_subtracted() -> None:
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
def test_post_norm_models_would_change(name: str) -> None:
    graph = ZOO[name]()
    assert worst(graph, as_rms(graph)) > 1e-2


def test_readers_of_the_mean_are_refused() -> None:
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
