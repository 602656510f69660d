"""Plans of parallelism: styles by path pattern, as transformers and engines match them."""

from __future__ import annotations

from typing import Any

import pytest

from weft import Attention, Block, Decoder, GatedMLP, LearnedPositions, RMSNorm, RoPE
from weft.backends.torch.transformers.engines.plans import make_plans, plan_pipeline
from weft.backends.torch.transformers.lower.lower_base_and_head import lower_sides
from weft.backends.torch.transformers.modeling.base import BaseModel
from weft.backends.torch.transformers.modeling.modeling_file import write_modeling

from .....lowered import forms
from ..tiny import base_of, plans_of


def test_layers_share_the_entries_of_the_tensor_plan() -> None:
    plan = plans_of("dense").by_name["base_model_tp_plan"]
    attn = {f"layers.*.attn.{n}": style for n, style in zip("qkvo", ["colwise"] * 3 + ["rowwise"], strict=True)}
    ffn = {f"layers.*.ffn.{n}": style for n, style in (("up", "colwise"), ("gate", "colwise"), ("down", "rowwise"))}
    assert plan == attn | ffn


def test_default_fsdp_plan_is_left_out() -> None:
    assert "base_model_fsdp_plan" not in plans_of("dense").by_name
    assert plans_of("alibi").by_name["base_model_fsdp_plan"] == {
        "embed_tokens": "free_full_weight", "layers.*": "free_full_weight",
    }  # fmt: skip


def test_experts_are_divided_within_or_between_devices() -> None:
    plans, home = plans_of("experts"), "layers.*.ffn.experts"
    assert plans.by_name["base_model_ep_plan"] == {
        f"{home}.gate_up_proj": "grouped_gemm", f"{home}.down_proj": "grouped_gemm", home: "ep_dispatch_experts",
    }  # fmt: skip
    tensor = plans.by_name["base_model_tp_plan"]
    assert (tensor[f"{home}.gate_up_proj"], tensor[f"{home}.down_proj"]) == ("packed_colwise", "rowwise")
    assert tensor[home] == "moe_tp_experts"


def test_parts_that_are_not_divided_have_reasons() -> None:
    assert set(plans_of("alibi").undivided.values()) == {"it has bias of its own for every head"}
    assert plans_of("mamba").undivided == {"": "it has no attention and no feed-forward of linear maps"}
    assert plans_of("mamba").units == {}


def test_layers_with_equal_names_must_be_divided_alike() -> None:
    attentions = [Attention(8, 4, rope=RoPE(), sinks=sinks) for sinks in (False, True)]
    graph = Decoder(60, 32, [Block(a, GatedMLP(48), RMSNorm()) for a in attentions]).graph()
    plans = make_plans(write_modeling(lower_sides(forms(graph, "transformers")), "Tiny", "tiny").bases)
    assert plans.undivided["layers.0.attn"] == "layers that are divided otherwise have parts of the same names"
    assert set(plans.units) == {"layers.0.ffn.down", "layers.1.ffn.down"}
    assert not any("attn" in path for path in plans.by_name["base_model_tp_plan"])


HIDDEN = (["hidden_states"], ["hidden_states"])


def base_with(**options: Any) -> BaseModel:
    graph = Decoder(60, 32, 2, Block(Attention(4), GatedMLP(48), RMSNorm()), **options).graph()
    return write_modeling(lower_sides(forms(graph, "transformers")), "Tiny", "tiny").bases[0]


@pytest.mark.parametrize("name", ["dense", "windows", "mamba"])
def test_stages_are_embedding_layers_and_norm(name: str) -> None:
    assert plan_pipeline(base_of(name)) == {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": HIDDEN,
    }


def test_learned_positions_compute_the_input_of_the_layers() -> None:
    assert plan_pipeline(base_with(positions=LearnedPositions(20))) == "positions computes the input of its layers"


def test_layers_that_read_the_embeddings_are_one_stage() -> None:
    assert plan_pipeline(base_of("alibi")) == "its layers also read the embeddings"
