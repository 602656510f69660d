"""Explanations of a decode step: the kernel of a node, the parts it includes, and reasons for fallbacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from weft import MLA, Attention, LayerNorm, MoE, RMSNorm, RoPE
from weft.backends.torch.decode.lower_step import DecodeStep
from weft.backends.torch.kernels.shared import launch
from weft.backends.torch.package.explain import Explanation
from weft.ir import Graph

from ....frontends.command import TINY, done, refused
from ....lowered import explain, step_of, write_step
from ....passes.zoo_variants import decoder, feeds
from ..generated import graph_of


def explain_op(graph: Graph, op: str, *device: Any) -> str:
    """Explain the nodes of one op, line by line, for a dtype and device as `explain` takes them."""
    return "\n".join(str(e) for e in explain(graph, *device) if e.op == op)


def test_equal_layers_are_explained_once() -> None:
    assert explain(graph_of("variant/grouped"))[1:] == [
        Explanation("layers.0.attn.q_2", "norm_qkv", 2, "norm_qkv"),
        Explanation("layers.0.attn.attention", "attention", 2, "decode_attention"),
        Explanation("layers.0.attn_residual", "linear_residual", 2, "linear_residual"),
        Explanation("layers.0.ffn.glu", "norm_glu", 2, "norm_glu"),
        Explanation("layers.0.ffn_residual", "linear_residual", 2, "linear_residual"),
        Explanation("lm_head", "norm_linear", 1, "norm_linear"),
    ]


def test_explanation_states_why_a_kernel_refuses_a_node() -> None:
    many = feeds(MoE(20, 7, 17)).graph()
    assert explain_op(many, "norm_route").endswith("torch, as norm_route: more than 512 experts or 16 choices")
    assert explain_op(many, "mixture") == "layers.0.ffn_residual (mixture × 2): moe_decode"
    odd = decoder(Attention(3, 1, 7)).graph()
    assert "torch, as norm_qkv: an odd number of elements per head" in explain_op(odd, "norm_qkv")
    wide = decoder(Attention(2, 1, 600)).graph()
    assert "torch, as decode_attention: a key and its value have 2048 elements" in explain_op(wide, "attention")
    assert "torch.float64 is not one of bf16, fp16, fp32" in explain_op(odd, "norm_glu", torch.float64)


@pytest.mark.parametrize(
    ("name", "op", "has"),
    [
        ("Mamba", "gated_selective_scan", {"softplus": True, "log_a": True, "kind": "none", "b_norm": False}),
        ("Mamba, norms", "gated_selective_scan", {"softplus": True, "kind": "rms", "b_norm": True, "c_norm": True}),
        ("Mamba-2", "gated_ssd", {"softplus": True, "log_a": True, "norm": True}),
        ("delta rule", "matrix_recurrence", {"unit": True, "norm": True}),
        ("delta rule, a gate per key", "matrix_recurrence", {"unit": True, "norm": True}),
        ("lightning attention", "matrix_recurrence", {"unit": False, "norm": True}),
        ("RWKV-6", "matrix_recurrence", {"unit": False, "norm": False}),
    ],
)
def test_recurrences_are_fused_with_their_gates_and_norms(name: str, op: str, has: dict[str, Any]) -> None:
    """Check that a fused recurrence is explained once, without entries for the ops that it includes."""
    graph = graph_of(f"variant/{name}")
    kernel = {"gated_selective_scan": "selective_step", "gated_ssd": "ssd_step"}.get(op, "matrix_step")
    (line,) = explain_op(graph, op).splitlines()
    assert re.fullmatch(rf"layers\.0\.attn\.\w+ \({op} × 2\): {kernel}", line)
    assert name == "RWKV-6" or not any(explain_op(graph, other) for other in ("softplus", "exp", "neg"))
    step = step_of(graph)
    assert isinstance(step, DecodeStep)
    made = next(n for n in step.graph.nodes if n.op.name == op)
    assert {k: made.attrs[k] for k in has} == has
    assert (name == "RWKV-6") == (made.operand("gate") is None)


def test_linear_attention_has_a_matrix_state_kernel() -> None:
    line = explain_op(graph_of("variant/linear attention"), "linear_attention")
    assert line == "layers.0.attn.linear_attention (linear_attention × 2): matrix_step"


@pytest.mark.parametrize("name", ["RG-LRU", "RWKV", "RWKV-7", "mLSTM"])
def test_custom_recurrences_have_generated_kernels(name: str) -> None:
    assert explain_op(graph_of(f"variant/{name}"), "scan") == "layers.0.attn.y (scan × 2): step_kernel"


def test_latent_attention_is_explained_with_its_projections() -> None:
    graph = graph_of("variant/latent queries")
    assert explain_op(graph, "norm_linear").splitlines()[:2] == [
        "layers.0.attn.norm_linear_5 (norm_linear × 2): norm_linear",
        "layers.0.attn.q_up (norm_linear × 2): norm_linear",
    ]
    assert explain_op(graph, "latent_qk") == "layers.0.attn.q (latent_qk × 2): latent_qk"
    assert explain_op(graph, "attention") == "layers.0.attn.attention (attention × 2): latent_decode"
    assert explain_op(graph, "head_linear") == "layers.0.attn.head_linear_2 (head_linear × 2): linear_by_head"
    assert not any(explain_op(graph, other) for other in ("rope", "concat", "rms_norm"))
    for norm, rope, why in (
        (LayerNorm(), RoPE(), "operand xs, %layers.0.attn.kv_norm, is made by layer_norm, not by split"),
        (RMSNorm(), RoPE(fraction=0.5), "queries and keys are not completely rotated by the same frequencies"),
    ):
        assert why in explain_op(decoder(MLA(3, 9, 5, 8, 7, rope, norm=norm)).graph(), "attention")


@pytest.mark.parametrize(
    ("name", "op", "why"),
    [
        ("variant/strided", "attention", "torch, its pattern is strided"),
        ("variant/T5 bias, per layer", "attention", "torch, it has a bias that is not ALiBi's"),
        ("variant/norms of q and k, full", "attention", "operand x, %layers.0.attn.q_norm, is made by rms_norm"),
        (
            "variant/experts that choose",
            "moe",
            "operand combine, %layers.0.ffn.expert_choice, is made by expert_choice, not by route",
        ),
        ("variant/relative", "relative_attention", "torch, its keys and values depend on distances"),
        ("variant/latent, keys chosen", "attention", "torch, its queries choose keys"),
        ("variant/latent, keys chosen", "lightning_index", "torch, no kernel chooses keys"),
    ],
)
def test_fallbacks_to_pytorch_have_reasons(name: str, op: str, why: str) -> None:
    assert why in explain_op(graph_of(name), op)


def test_scan_kernel_computes_products_before_the_recurrence() -> None:
    assert explain_op(graph_of("variant/sLSTM"), "scan").endswith("(scan × 2): step2_kernel")
    text, _ = write_step(graph_of("variant/sLSTM"))
    assert "*step_products(" in text and "def products(" in text and "head_linear" in text


def test_clamped_gates_expert_groups_and_sparse_patterns_have_kernels() -> None:
    for name in ("variant/chunked", "variant/dilated"):
        assert "layers.0.attn.attention (attention × 2): decode_attention" in explain_op(graph_of(name), "attention")
    assert explain_op(graph_of("variant/clamped gate"), "norm_glu") == "layers.0.ffn.glu (norm_glu × 2): norm_glu"
    groups = graph_of("variant/experts in groups")
    assert explain_op(groups, "norm_route") == "layers.0.ffn.chosen (norm_route × 2): norm_route"
    assert explain_op(groups, "mixture") == "layers.0.ffn_residual (mixture × 2): moe_decode"


def test_cpus_and_old_gpus_run_no_kernels() -> None:
    graph = graph_of("variant/grouped")
    assert "as norm_glu: Triton does not run on a CPU" in explain_op(graph, "norm_glu", torch.float32, None)
    assert "as norm_glu: compute capability 7.5 is older than 8.0" in explain_op(
        graph, "norm_glu", torch.float16, (7, 5)
    )
    (whole,) = explain(graph_of("family/bert"))
    assert str(whole) == "bert (graph): torch, no decode step, the model itself runs: the model is not a decoder"


def test_assumed_capability_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    x = torch.empty(1)
    before = launch.refusal(x)
    with launch.assume_capability((9, 0)):
        assert launch.refusal(x) is None
        with launch.assume_capability((7, 0)):
            assert launch.refusal(x) == "compute capability 7.0 is older than 8.0"
        assert launch.refusal(x) is None
    assert launch.refusal(x) == before and before is not None


def test_compile_prints_the_explanation(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    source, out = f"{tmp_path / 'tiny.py'}:model", tmp_path / "out"
    lines = done("compile", source, "-o", out, "--target", "torch", "--explain").stdout.splitlines()
    assert "layers.0.ffn.glu (norm_glu × 3): norm_glu" in lines
    assert "on this CPU: torch, weights packed by oneDNN" in lines
    assert "--explain is for the targets torch and transformers only, not for ort-cpu" in refused(
        "compile", source, "-o", out, "--explain"
    )
