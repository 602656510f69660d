"""fuse-norm-linear: where it fires, what it leaves alone, and the fused models on every target and in every cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch

import weft
from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.frontends.formats.hf.folder import load_folder
from weft.ir import Graph, Param, TensorType, WeftError, interpret, ops
from weft.ir.types import dtypes, sizes
from weft.passes import Trace, legalize, run_passes
from weft.passes.core.equivalence import EXACT

from ....e2e.families import LENGTH, ROWS, VOCAB, error, reference
from ...models import Tiny, applied, count, weight, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import TRIED, ZOO

PACK = "pack-qkv, pack-gate-up, fuse-residual-norm"
# Linears that read a norm nobody else reads, counted by hand: per layer q, k, v and gate, up (packed: one each), and
# the head where it is not tied. Norms that experts, the residual or a rotation read are left alone.
EXPECTED = {
    "family/llama-gqa-tied": 3 * 5,
    "family/llama-mha-biases": 3 * 5 + 1,
    "packed/family llama-mha-biases": 3 * 2 + 1,
    "family/gpt2-tied": 3 * 4,  # q, k, v and up
    "family/gpt2-untied": 3 * 4 + 1,
    "packed/family gpt2-tied": 3 * 2,
    "family/gemma2": 3 * 5,  # not the norms after the sublayers
    "family/olmo2-gqa": 1,  # the head: all other norms come after something
    "family/olmo": 3 * 5 + 1,  # LayerNorms without parameters
    "family/phi3": 3 * 5 + 1,
    "family/gptj": 3 * 4 + 1,  # attention and feed-forward read one norm
    "family/bloom": 3 * 4,  # not the norm of the embedding
    "family/mixtral": 3 * 3 + 1,  # experts read the others
    "family/deepseek-v3": 3 * 3 + 2 + 1,  # latents of q and kv down, q up; one dense layer; the head
    "family/mamba": 3 * 1,
    "family/bert": 0,
    "family/roberta": 0,
    "family/t5": 2 * (3 + 1) + 2 * (3 + 1 + 1) + 2 * 2 + 4,
    "variant/repeated": 2 * 2 * 5 + 1,
    "variant/post": 1,
    "cached/preset gpt2": 2,
}


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("name", EXPECTED)
def test_every_linear_after_a_norm_is_fused(name: str) -> None:
    graph, trace = ZOO[name](), Trace()
    after = applied("fuse-norm-linear", graph, trace)
    assert trace.rewrites["fuse-norm-linear"] == count(after, "norm_linear") == EXPECTED[name]
    assert worst(graph, after) <= EXACT
    fused = {n.inputs[0] for n in after.nodes if n.op is ops.norm_linear}
    assert len(fused) == sum(count(graph, n) - count(after, n) for n in ("rms_norm", "layer_norm", "add_norm"))


@pytest.mark.parametrize("name", [name for name in TRIED if name.startswith("family/")])
def test_no_family_has_a_linear_left_that_could_be_fused(name: str) -> None:
    """With copies allowed, a linear stays behind a norm only if the norm has another reader that is not a linear, or is
    that of a parameter."""
    graph = ZOO[name]()
    after = applied("fuse-norm-linear{untie=true}", graph)
    kinds = (ops.rms_norm, ops.layer_norm, ops.add_norm)
    norms = [n.output for n in after.nodes if n.op in kinds and not isinstance(n.inputs[0], Param)]
    assert all(v.is_output or {n.op.name for n in v.users} != {"linear"} for v in norms)
    assert count(after, "norm_linear") + count(after, "linear") == count(graph, "linear")


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_weight_and_bias_of_a_norm_go_into_the_linear_or_come_along(norm: str) -> None:
    """With `fold` into its weight and bias; without, both are operands, weights stay, and every linear of tokens is
    fused, after a norm or not."""
    before = Tiny(norm=norm, bias="q").graph()
    for fold in (True, False):
        after = applied(f"fuse-norm-linear{{fold={str(fold).lower()}}}", before)
        fused = [n for n in after.nodes if n.op is ops.norm_linear]
        assert worst(before, after) <= EXACT
        assert all((n.operand("norm_weight") is None) == (fold or n.attrs["kind"] == "none") for n in fused)
        if fold:
            assert {n.attrs["kind"] for n in fused} == {norm} and before.params.keys() != after.params.keys()
            assert norm == "rms" or all(n.operand("bias") is not None for n in fused)
        else:
            assert {n.attrs["kind"] for n in fused} == {norm, "none"} and count(after, "linear") == 0
            assert before.params.keys() == after.params.keys()


def test_other_passes_do_not_look_into_fused_ops() -> None:
    with pytest.raises(WeftError, match=r"pass pack-qkv does not support fused ops, such as norm_linear \(%layers"):
        run_passes(Tiny().graph(), "fuse-norm-linear{fold=false}, pack-qkv")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("family/mixtral", "it is read by moe (%layers.0.ffn.moe)"),
        ("family/bert", "it is a summand of add (%layers.0.attn_residual)"),
        ("family/bloom", "it is read by layer_norm (%layers.0.attn_norm)"),
        ("family/gpt2-tied", "its reader's %embed.weight is shared with embedding (%embed); untie=true copies it"),
        ("variant/encoder, pre-norm", "%final_norm is an output of the graph"),
        ("variant/norms of q and k, full", "it is read by rope (%layers.0.attn.q_rope)"),
    ],
)
def test_refusals_state_their_reasons(name: str, reason: str) -> None:
    trace = Trace()
    applied("fuse-norm-linear", ZOO[name](), trace)
    assert reason in {refused.reason for refused in trace.refusals}


def test_slice_between_norm_and_linear_prevents_fusion() -> None:
    g = Graph("pooled")
    normed = ops.rms_norm(g.add_input("x", TensorType(dtypes.f32, (sizes.sym("n"), 3, 6))))
    g.add_output("y", ops.linear(ops.slice_(normed, axis=1, start=0, stop=1, name="first"), weight(g, "w", 4, 6)))
    trace = Trace()
    assert applied("fuse-norm-linear", g, trace) == g
    assert [refused.reason for refused in trace.refusals] == ["it is read by slice (%first)"]


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_tied_head_is_fused_where_its_weight_stays(norm: str) -> None:
    """A norm without a weight changes nothing in the matrix."""
    graph = applied("fold-norm-scale", Tiny(norm=norm, tied=True).graph())
    final = next(n for n in graph.nodes if n.output.name == "final_norm")
    with graph.inserting(before=final):
        plain = (ops.rms_norm if norm == "rms" else ops.layer_norm)(final.inputs[0], eps=1e-5)
    graph.replace(final, plain)
    after = applied("fuse-norm-linear", graph)
    head = next(n for n in after.nodes if n.output.name == "lm_head")
    assert head.op is ops.norm_linear and worst(graph, after) <= EXACT
    assert head.inputs[1] is after.params["embed.weight"]


@pytest.mark.parametrize("tiny", [Tiny(), Tiny(norm="layer", bias="q k v up", window=3, kv_heads=6)], ids=str)
def test_caches_and_last_tokens_work_around_it(tiny: Tiny) -> None:
    fused = f"{PACK}, fuse-norm-linear, kv-cache, last-token-logits"
    late = f"{PACK}, kv-cache, last-token-logits, fuse-norm-linear"
    for pipeline in (fused, late):
        after = run_passes(tiny.graph(), pipeline, verify=True)
        assert count(after, "norm_linear") == 2 * tiny.layers + 1
        head = next(n for n in after.nodes if n.op is ops.norm_linear and n.output.shape[-1] == tiny.vocab)
        assert head.output.shape[1] == 1


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_fused_norms_are_norms_in_onnx(kind: str, target: str) -> None:
    """One for all linears of a norm, whether its weight is folded or not."""
    graph = Tiny(norm=kind, layers=1, rope=False).graph()
    feeds = {"input_ids": np.random.default_rng(0).integers(0, 37, (2, 5))}
    want, place = interpret(graph, feeds)["logits"], TARGETS[target]
    norms = {"rms": ("RMSNormalization", "SimplifiedLayerNormalization"), "layer": ("LayerNormalization",)}[kind]
    for fold in ("true", "false"):
        after = applied(f"fuse-norm-linear{{fold={fold}}}", graph)
        legalize(after, lambda node: list_refusals(node, place))
        built = build_model(after, place, max_length=16)
        assert sum(n.op_type in norms for n in built.model.graph) == 3
        session = ort.InferenceSession(serialize_model(built), providers=["CPUExecutionProvider"])
        (got,) = session.run(None, feeds)
        assert error(got, want) < 1e-5


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
@pytest.mark.parametrize("name", ["gpt2-tied", "llama-gqa-tied", "stablelm"])
def test_fused_models_equal_transformers(name: str, target: str, tmp_path: Path) -> None:
    """In float64 through the interpreter, and compiled, decoding token by token."""
    model = ROWS[name].save(tmp_path / "hf")
    ids = np.random.default_rng(1).integers(3, VOCAB, (1, LENGTH))
    fuse = f"{PACK}, fuse-norm-linear{{untie=true}}"
    weft.compile(tmp_path / "hf", tmp_path / "out", target=target, passes=f"{fuse}, kv-cache", max_length=LENGTH)
    want = reference(model, ids)[0]
    assert error(weft.load(tmp_path / "out").logits(ids[0].tolist(), chunk=1), want) < 1e-4
    if target == "onnx":
        return
    graph = run_passes(load_folder(tmp_path / "hf")[1].graph, fuse)
    assert count(graph, "norm_linear") == 3 * 2 + 1
    feeds = {"input_ids": ids, "position_ids": np.arange(LENGTH)[None]}
    got = interpret(graph, {k: v for k, v in feeds.items() if k in graph.inputs})["logits"][0]
    with torch.inference_mode():
        exact = model.double()(torch.from_numpy(ids)).logits[0].numpy()
    assert error(got, exact) < 1e-5  # weights are rounded to float32 after they are multiplied
