"""Config fields of architectures: sizes of axes and attributes of nodes by their role."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weft import MLA, Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.backends.torch.transformers.config_fields.size_names import (
    SOFTCAP_DIVISION,
    ConfigValue,
    Fields,
    SizeNames,
    find_attention,
    get_attention_kind,
    map_logit_nodes,
    write_expression,
)
from weft.backends.torch.transformers.lower.lower_base_and_head import lower_sides
from weft.ir import Graph, Node
from weft.ir.types.sizes import Size, evaluate, floordiv, sym

from .....lowered import forms
from ..tiny import base_of, graph_of


def find(graph: Graph, op: str) -> Node:
    return next(n for n in graph.nodes if n.op.name == op)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dense", {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4,
                   "head_dim": 4, "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 10000}),
        ("windows", {"sliding_window": 3, "num_attention_heads": 8}),
        ("experts", {"num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}),
        ("mamba", {"mamba_intermediate_size": 32, "state_size": 4, "conv_kernel": 4, "time_step_rank": 2}),
    ],
)  # fmt: skip
def test_fields_have_the_names_of_transformers(name: str, expected: dict[str, float]) -> None:
    fields = base_of(name).lowered.fields.values
    assert {key: fields.get(key) for key in expected} == expected


def test_latent_attention_has_the_fields_of_deepseek() -> None:
    """One field for each width of the paper, and none for their sums and products."""
    block = Block(MLA(4, 10, 6, 2, 5, RoPE(), q_rank=7), GatedMLP(48), RMSNorm())
    fields = lower_sides(forms(Decoder(60, 32, 1, block).graph(), "transformers"))[0].fields.values
    ranks = {"q_lora_rank": 7, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 5}
    others = {
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
    }
    sizes = {key: value for key, value in fields.items() if isinstance(value, int) and key != "rope_theta"}
    assert {key: sizes.get(key) for key in ranks} == ranks and sizes.keys() - ranks.keys() == others | {"head_dim"}


def test_sizes_and_attributes_are_expressions() -> None:
    graph = graph_of("dense").clone()
    names = SizeNames(graph, Fields())
    node = find(graph, "attention")
    assert str(names.get_size(node.required_operand("q"), -1)) == "config.num_attention_heads * config.head_dim"
    heads = names.get_attr(node, "kv_heads")
    assert isinstance(heads, ConfigValue) and (int(heads), str(heads)) == (4, "config.num_key_value_heads")
    assert names.get_attr(node, "window") is None
    assert names.get_size(node.required_operand("q"), 0) == node.required_operand("q").shape[0]


def test_attentions_are_local_global_or_cross() -> None:
    kinds = [get_attention_kind(n) for n in graph_of("windows").nodes if n.op.name == "attention"]
    assert kinds == ["local", "local", "global"]


def test_different_kinds_of_attention_have_prefixed_fields() -> None:
    blocks = [Block(Attention(h, window=w), GatedMLP(48), RMSNorm()) for h, w in ((8, None), (4, 3))]
    fields = Fields()
    SizeNames(Decoder(60, 32, blocks).graph(), fields)
    assert (fields.values["num_attention_heads"], fields.values["local_num_attention_heads"]) == (8, 4)


def test_attention_that_reads_a_value_is_found_through_moves() -> None:
    graph = graph_of("dense")
    node = find(graph, "attention")
    assert find_attention(node.required_operand("k")) == (node, "k")
    assert find_attention(graph.outputs["logits"]) is None


def test_soft_cap_of_logits_is_a_field() -> None:
    graph = Decoder(60, 32, 1, Block(Attention(4), GatedMLP(48), RMSNorm()), logit_softcap=30.0).graph()
    assert list(map_logit_nodes(graph).values()) == [SOFTCAP_DIVISION, "final_logit_softcapping"]
    assert map_logit_nodes(graph_of("dense")) == map_logit_nodes(graph_of("encoder")) == {}


def test_equal_values_share_a_field_and_others_get_a_prefix_or_number() -> None:
    fields = Fields()
    assert [fields.choose_name("head_dim", n, kind) for n, kind in ((8, ""), (8, "local"), (4, "local"), (4, ""))] == [
        "head_dim", "head_dim", "local_head_dim", "head_dim_2",
    ]  # fmt: skip
    assert fields.choose_name("head_dim", 2) == "head_dim_3"
    assert fields.values == {"head_dim": 8, "local_head_dim": 4, "head_dim_2": 4, "head_dim_3": 2}


def test_prefix_is_not_repeated() -> None:
    fields = Fields({"rms_norm_eps": 1e-6})
    assert fields.choose_name("rms_norm_eps", 1e-5, "rms_norm") == "rms_norm_eps_2"


def test_fields_of_the_encoder_have_its_prefix() -> None:
    fields = Fields({"hidden_size": 32}, side="encoder")
    assert fields.choose_name("hidden_size", 32) == "hidden_size"
    assert fields.choose_name("hidden_size", 16) == "encoder_hidden_size"
    fields.side = "decoder"  # transformers reads decoder_x as x
    assert fields.choose_name("hidden_size", 8) == "hidden_size_2"


def test_sizes_are_symbols() -> None:
    assert Fields().choose_size("hidden_size", 32) == sym("hidden_size")


H, N, D = sym("hidden_size"), sym("num_heads"), sym("head_dim")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (7, "7"),
        (H, "config.hidden_size"),
        (D * N, "config.num_heads * config.head_dim"),
        (N * 2, "2 * config.num_heads"),
        (D * D, "config.head_dim ** 2"),
        (N + -1, "(config.num_heads - 1)"),
        (floordiv(H, N), "((config.hidden_size // config.num_heads))"),
    ],
)
def test_expressions_read_the_config(size: Size, text: str) -> None:
    assert write_expression(size) == text
    values = {"hidden_size": 32, "num_heads": 4, "head_dim": 6}
    assert eval(text, {"config": SimpleNamespace(**values)}) == evaluate(size, values)


def test_config_values_compute_and_print_their_expression() -> None:
    heads, kv = ConfigValue(8, N), ConfigValue(4, sym("kv"))
    groups = heads // kv
    assert isinstance(groups, ConfigValue) and int(groups) == 2
    assert f"{heads - 1}" == "(config.num_heads - 1)" and int(heads - 1) == 7
    assert "config.num_heads // config.kv" in repr(groups)
    width = ConfigValue(24, N * D) // ConfigValue(4, N)
    assert (int(width), str(width)) == (6, "config.head_dim")
    assert int(ConfigValue(8, N) // heads) == 1
    rest = 32 // heads
    assert int(rest) == 4 and "32 // config.num_heads" in str(rest)
