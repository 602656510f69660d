"""Explanations of a decode step: the kernel of a node, the parts it includes, and reasons for fallbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from weft import MLA, Attention, LayerNorm, MoE, RMSNorm, RoPE
from weft.backends.torch.decode.source import write_step
from weft.backends.torch.kernels.shared import launch
from weft.backends.torch.lower.lower import lower
from weft.backends.torch.package.explain import Explained, explain
from weft.ir import Graph

from ...frontends.command import TINY, done, refused
from ...passes.zoo_variants import decoder, feeds
from .generated import graph_of


def told(graph: Graph, op: str, *device: Any) -> str:
    """Explain the nodes of one op, line by line, for a dtype and device as `explain` takes them."""
    return "\n".join(str(e) for e in explain(graph, *device) if e.op == op)


def test_layers_that_are_alike_are_told_once() -> None:
    assert explain(graph_of("variant/grouped"))[1:] == [
        Explained("layers.0.attn.attention", "attention", 2, "norm_qkv", "norm, projections, rotation, cache"),
        Explained("layers.0.attn.attention", "attention", 2, "decode_attention"),
        Explained("layers.0.attn_residual", "add", 2, "linear_residual", "projection"),
        Explained("layers.0.ffn.glu", "glu", 2, "norm_glu", "norm, gate and up"),
        Explained("layers.0.ffn_residual", "add", 2, "linear_residual", "projection"),
        Explained("lm_head", "linear", 1, "norm_linear", "norm"),
    ]


def test_kernels_say_themselves_what_they_do_not_take() -> None:
    many = feeds(MoE(20, 7, 17)).graph()
    assert told(many, "add").splitlines()[1:] == [
        "layers.0.ffn_residual (add × 2): torch, as norm_route: more than 512 experts or 16 choices",
        "layers.0.ffn_residual (add × 2): moe_decode with norm, addition",
    ]
    odd = decoder(Attention(3, 1, 7)).graph()
    assert "torch, as norm_qkv: an odd number of elements per head" in told(odd, "attention")
    wide = decoder(Attention(2, 1, 600)).graph()
    assert "torch, as decode_attention: a key and its value are 2048 numbers" in told(wide, "attention")
    assert "torch.float64 is none of bf16, fp16, fp32" in told(odd, "glu", torch.float64)


@pytest.mark.parametrize(
    ("name", "op", "what"),
    [
        ("variant/Mamba", "selective_scan", "selective_step with projection of its step, softplus, state, gate"),
        (
            "variant/Mamba, norms",
            "selective_scan",
            "selective_step with norms, projection of its step, softplus, state, gate",
        ),
        ("variant/Mamba-2", "ssd", "ssd_step with softplus, state, gate, norm"),
    ],
)
def test_recurrences_say_what_is_computed_with_them(name: str, op: str, what: str) -> None:
    """They are told of once, and what they compute is not told again."""
    graph = graph_of(name)
    assert told(graph, op) == f"layers.0.attn.{op} ({op} × {sum(n.op.name == op for n in graph.nodes)}): {what}"
    assert not any(told(graph, other) for other in ("mul", "swish", "softplus"))


@pytest.mark.parametrize(
    ("name", "op", "parts"),
    [
        ("delta rule", "gated_delta_rule", "norms, decay, state, norm, gate"),
        ("delta rule, a gate per key", "gated_delta_rule", "norms, decay, state, norm, gate"),
        ("lightning attention", "gated_linear_attention", "state, norm, gate"),
        ("RWKV-6", "gated_linear_attention", "state"),
        ("linear attention", "linear_attention", "state"),
    ],
)
def test_states_that_are_matrices_have_a_kernel(name: str, op: str, parts: str) -> None:
    assert told(graph_of(f"variant/{name}"), op) == f"layers.0.attn.{op} ({op} × 2): matrix_step with {parts}"


@pytest.mark.parametrize("name", ["RG-LRU", "RWKV", "RWKV-7", "mLSTM"])
def test_recurrences_of_ones_own_have_generated_kernels(name: str) -> None:
    assert told(graph_of(f"variant/{name}"), "scan") == "layers.0.attn.y (scan × 2): step_kernel with state"


def test_latent_attention_says_what_is_computed_with_it() -> None:
    graph = graph_of("variant/latent queries")
    assert told(graph, "linear").splitlines()[:2] == [
        "layers.0.attn.q_down (linear × 2): norm_linear with norm, kv_down",
        "layers.0.attn.q_up (linear × 2): norm_linear with norm",
    ]
    assert told(graph, "attention").splitlines() == [
        "layers.0.attn.attention (attention × 2): latent_qk with absorption, norm, rotation, cache",
        "layers.0.attn.attention (attention × 2): latent_decode",
    ]
    assert told(graph, "head_linear") == "layers.0.attn.head_linear_2 (head_linear × 2): linear_by_head"
    assert not any(told(graph, other) for other in ("rope", "concat", "rms_norm"))
    for norm, rope, why in (
        (LayerNorm(), RoPE(), "its latent, or the RMS norm of that, is not split from what is turned"),
        (RMSNorm(), RoPE(fraction=0.5), "queries and keys are not turned alike, and whole"),
    ):
        assert f"latent_qk does not make its operands: {why}" in told(
            decoder(MLA(3, 9, 5, 8, 7, rope, norm=norm)).graph(), "attention"
        )


@pytest.mark.parametrize(
    ("name", "op", "why"),
    [
        ("variant/strided", "attention", "torch, its pattern is strided"),
        ("variant/T5 bias, per layer", "attention", "torch, it has a bias that is not ALiBi's"),
        ("variant/norms of q and k, full", "attention", "norm_qkv does not make its operands"),
        ("variant/experts that choose", "moe", "torch, what weighs the experts is no router's choice alone"),
        ("variant/relative", "relative_attention", "torch, its keys and values depend on distances"),
        ("variant/latent, keys chosen", "attention", "torch, its queries choose keys"),
        ("variant/latent, keys chosen", "lightning_index", "torch, no kernel chooses keys"),
    ],
)
def test_forms_that_have_no_kernel_say_why(name: str, op: str, why: str) -> None:
    assert why in told(graph_of(name), op)


def test_products_in_a_recurrence_come_before_its_kernel() -> None:
    assert told(graph_of("variant/sLSTM"), "scan").endswith("(scan × 2): step2_kernel with state")
    text, _ = write_step(lower(graph_of("variant/sLSTM")))
    assert "*products_of(" in text and "def products(" in text and "head_linear" in text


def test_limited_gates_groups_of_experts_and_patterns_have_kernels() -> None:
    for name in ("variant/chunked", "variant/dilated"):
        assert "layers.0.attn.attention (attention × 2): decode_attention" in told(graph_of(name), "attention")
    assert (
        told(graph_of("variant/clamped gate"), "glu") == "layers.0.ffn.glu (glu × 2): norm_glu with norm, gate and up"
    )
    assert told(graph_of("variant/experts in groups"), "add").splitlines()[1:] == [
        "layers.0.ffn_residual (add × 2): norm_route with norm and router",
        "layers.0.ffn_residual (add × 2): moe_decode with norm, addition",
    ]


def test_devices_without_kernels() -> None:
    graph = graph_of("variant/grouped")
    assert "as norm_glu: Triton does not run on a CPU" in told(graph, "glu", torch.float32, None)
    assert "as norm_glu: compute capability 7.5 is older than 8.0" in told(graph, "glu", torch.float16, (7, 5))
    (whole,) = explain(graph_of("family/bert"))
    assert str(whole) == "bert (graph): torch, no decode step, the model itself runs: the model is not a decoder"


def test_an_assumed_device_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    x = torch.empty(1)
    before = launch.refusal(x)
    with launch.assumed((9, 0)):
        assert launch.refusal(x) is None
        with launch.assumed((7, 0)):
            assert launch.refusal(x) == "compute capability 7.0 is older than 8.0"
        assert launch.refusal(x) is None
    assert launch.refusal(x) == before and before is not None


def test_compile_explains(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    source, out = f"{tmp_path / 'tiny.py'}:model", tmp_path / "out"
    lines = done("compile", source, "-o", out, "--target", "torch", "--explain").stdout.splitlines()
    assert "layers.0.ffn.glu (glu × 3): norm_glu with norm, gate and up" in lines
    assert "on this CPU: torch, weights packed by oneDNN" in lines
    assert "--explain supports the targets torch and transformers only, not ort-cpu" in refused(
        "compile", source, "-o", out, "--explain"
    )
