"""Folders as engines hold them (`contract`): tokens of several texts in one row, divided linear maps, stages, experts.

What an engine makes of each text equals the float64 reference; what it would make otherwise is refused, with a reason.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import weft
from weft import Attention, Block, Decoder, GatedMLP, QKNorm, RMSNorm, RoPE
from weft.backends.torch.transformers.engines.refusals import list_limits
from weft.backends.torch.transformers.transformers_folder import TransformersFolder
from weft.ir import Graph
from weft.passes import Report

from ...backends.torch.transformers.folders import error, folder_of, graph_of, lowered, tokens_of
from ...e2e.random_models import strong
from ...lowered import forms
from ...passes.zoo import shrunk
from ...sampling import each
from .checks import BOUND, reference_of
from .contract import SGLANG, VLLM, Engine, serve
from .models import MODELS, graph_named

EXAMPLES = Path(__file__).parents[3] / "examples"
LENGTHS = (4, 7, 3)
TAKEN = (
    *("preset/gpt2", "preset/llama3.1-8b", "preset/mistral-7b", "preset/qwen3-30b-a3b", "preset/deepseek-v3"),
    *("family/gemma2", "family/phi3", "family/falcon-gqa", "variant/gate", "variant/scaled", "variant/latent"),
    *("example/alternating", "example/local_global", "example/parallel_block", "example/squared_relu"),
)
DEGREES: tuple[dict[str, Any], ...] = ({"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}, {"pp": 4})
STYLES = {  # that SGLang takes; vLLM replicates what it does not know
    *("colwise", "rowwise", "replicate", "packed_colwise", "moe_tp_experts", "replicated_with_grad_allreduce"),
}
SPARSE: tuple[dict[str, Any], ...] = ({"tp": 2, "whole_experts": True}, {"tp": 4, "pp": 2, "whole_experts": True})


def graph_for(name: str) -> Graph:
    """A graph of the zoo, a small one of an example, or one of `MODELS`."""
    kind, _, stem = name.partition("/")
    if name in MODELS or kind == "drawn":
        return graph_named(name)
    if kind == "example":
        module = weft.load_source(EXAMPLES / f"{stem}.py").module
        return lowered(strong(shrunk(module).graph(name=stem)))
    return lowered(graph_of(name))


def served(graph: Graph, folder: Path, engine: Engine, **degrees: Any) -> float:
    """The largest error of an engine over texts in one row, on any device."""
    texts = [tokens_of(graph, n, seed=n) for n in LENGTHS]
    wanted = [reference_of(graph, text[None].numpy())[0] for text in texts]
    made = serve(folder, engine, texts, **degrees)
    return max(error(text, want) for device in made for text, want in zip(device, wanted, strict=True))


def taken(built: TransformersFolder) -> list[Engine]:
    return [engine for engine in (VLLM, SGLANG) if not built.refusals[engine.name]]


def check(name: str, folder: Path) -> int:
    """Let each engine that takes a model serve it on one device, and in two stages; count the engines."""
    graph = graph_for(name)
    built = folder_of(graph, folder)
    for engine in taken(built):
        assert served(graph, folder, engine) <= BOUND
        if not built.plans.one_stage:
            assert served(graph, folder, engine, pp=2) <= BOUND
    return len(taken(built))


@pytest.mark.parametrize("name", each(2, TAKEN))
def test_packed_sequences_equal_separate_ones(name: str, tmp_path: Path) -> None:
    assert check(name, tmp_path) > 0


@pytest.mark.parametrize("name", [*MODELS, *(f"drawn/{seed}" for seed in each(4, range(8)))])
def test_devices_and_stages(name: str, tmp_path: Path) -> None:
    check_degrees(name, tmp_path)


def check_degrees(name: str, folder: Path) -> None:
    """Let engines divide a model among devices and stages."""
    graph = graph_for(name)
    built = folder_of(graph, folder)
    refused = built.refusals[VLLM.name]
    assert refused == (["layers have different numbers or widths of heads"] if name == "deepseek" else [])
    assert {*built.plans.by_name.get("base_model_tp_plan", {}).values()} <= STYLES
    without = list_limits(built.base.lowered, built.plans)
    whole, one_stage = (any(line.startswith(what) for line in without) for what in ("tensor", "pipeline"))
    for degrees in (*DEGREES, *(SPARSE if built.base.lowered.emitter.experts else ())):
        if not refused and not (whole and "tp" in degrees) and not (one_stage and "pp" in degrees):
            assert served(graph, folder, VLLM, **degrees) <= BOUND, degrees
    if SGLANG in taken(built) and not whole:
        assert served(graph, folder, SGLANG, tp=2) <= BOUND


REFUSED = [
    ("variant/soft cap", SGLANG, "scores have a soft cap, which its attention does not compute"),
    ("variant/biases", SGLANG, "the head has a bias, which it does not load"),
    ("variant/chunked", VLLM, "attention in chunks, for which engines make no masks"),
    ("variant/tied, scaled", VLLM, "logits are scaled before the soft cap"),
    ("variant/experts in a hierarchy", VLLM, "experts are not described by the config's num_experts_per_tok"),
    ("variant/experts, hand-written router", VLLM, "experts are not SwiGLU"),
    ("family/bloom", VLLM, "scores have a bias by distance (ALiBi, T5)"),
    ("random/29", VLLM, "layers have different numbers or widths of heads"),
]


@pytest.mark.parametrize(("name", "engine", "reason"), REFUSED, ids=[f"{e.name} {n}" for n, e, _ in REFUSED])
def test_refused_divisions_would_give_wrong_logits(name: str, engine: Engine, reason: str, tmp_path: Path) -> None:
    """--explain names the engine and the reason; without the refusal the engine would fail or be wrong."""
    graph = graph_for(name)
    built = folder_of(graph, tmp_path)
    assert any(re.match(rf"{engine.name}: .*{re.escape(reason)}", line) for line in built.explain(Report()))
    try:
        wrong = served(graph, tmp_path, engine)
    except (AssertionError, AttributeError, TypeError, RuntimeError, KeyError):
        return
    assert wrong > 100 * BOUND


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt", "positions computes the input of its layers"),
        ("variant/embedding norm", "embed_norm computes the input of its layers"),
        ("variant/repeated", "it has no list of layers, or its layers share weights"),
        ("variant/norms without weights", "more than modules follows its layers"),
    ],
)
def test_single_stage_is_explained(name: str, reason: str, tmp_path: Path) -> None:
    built = folder_of(graph_for(name), tmp_path)
    assert f"pipeline parallelism: one stage, {reason}" in built.explain(Report())
    assert "base_model_pp_plan" not in built.plans.by_name
    taking = [line for line in built.explain(Report()) if line.startswith("vLLM: runs it")]
    assert all(line.endswith(f"; without pipeline parallelism: {reason}") for line in taking)


def test_undivided_attention_is_explained() -> None:
    """Engines divide the heads of every attention: with one that is not divided they run on one device."""
    block = Block(Attention(8, 4, rope=RoPE(), qk_norm=QKNorm(RMSNorm(), over="full")), GatedMLP(48), RMSNorm())
    graph = lowered(Decoder(64, 32, [block] * 2, context=32).graph(name="normed"))
    built = TransformersFolder(forms(graph, "transformers"), "f32", 64, "Tiny", [])
    assert "vLLM: runs it; without tensor parallelism: layers.*.attn is not divided" in built.explain(Report())
    reason = "its queries and keys are normed across heads"
    assert f"tensor parallelism: layers.*.attn is not divided, {reason}" in built.explain(Report())


def test_names_with_a_common_prefix_are_distinguished() -> None:
    """Engines match the names of a plan from the beginning: that of ``attn.o`` also matches ``attn.out``."""
    graph = graph_for("random/27")
    plan = TransformersFolder(forms(graph, "transformers"), "f32", 64, "Tiny", []).plans.by_name["base_model_tp_plan"]
    assert list(plan).index("layers.*.attn.out") < list(plan).index("layers.*.attn.o")
    assert plan["layers.*.attn.out"] == "replicate" and plan["layers.*.attn.o"] == "rowwise"
