"""Softmax attention as calls of the attention functions of transformers."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from weft import MLA, MLP, Attention, Block, Decoder, GatedMLP, LightningIndex, RMSNorm, RoPE
from weft.backends.torch.transformers.lower.attention_functions import is_batched, parenthesize
from weft.backends.torch.transformers.lower.lower_base_and_head import LoweredModel, lower_sides
from weft.ir import WeftError

from .....lowered import forms
from ....torch import generated
from ..tiny import base_of, graph_of


def lower_attention(attention: Attention) -> LoweredModel:
    graph = Decoder(60, 32, 1, Block(attention, GatedMLP(48), RMSNorm())).graph()
    return lower_sides(forms(graph, "transformers"))[0]


def test_attention_is_called_in_the_module_of_its_projections() -> None:
    lowered = base_of("dense").lowered
    assert len(lowered.emitter.attentions) == 3
    for i, (statement, record) in enumerate(lowered.emitter.attentions.items()):
        assert statement.text == "{4}(self, {0}, {1}, {2}, {3}, scaling=self.scaling, **kwargs)"
        assert (statement.scope, len(statement.results)) == (f"layers.{i}.attn", 2)
        assert (record.scaling, record.causal, record.features) == ("config.head_dim ** -0.5", True, set())
        assert record.groups == "config.num_attention_heads // config.num_key_value_heads"


def test_keys_and_values_are_cached_before_the_attention() -> None:
    texts = [s.text for s in base_of("dense").lowered.base.statements]
    assert texts.count("({2}, {3}) if {0} is None else {0}.update({2}, {3}, {1}, kwargs=kwargs)") == 3
    assert not any("update(" in s.text for s in base_of("encoder").lowered.base.statements)


def test_soft_cap_sinks_and_window_are_keyword_arguments() -> None:
    lowered = lower_attention(Attention(4, 2, softcap=30.0, sinks=True, window=5, scale=0.5))
    ((statement, record),) = lowered.emitter.attentions.items()
    assert "softcap=config.attn_logit_softcapping, s_aux={4}, sliding_window=config.sliding_window" in statement.text
    assert record.features == {"softcap", "s_aux", "sliding_window"}
    assert record.scaling == "config.attention_multiplier"
    assert any("eager_scored_attention" in s.text for s in lowered.base.statements)


def test_lightning_index_has_no_cache() -> None:
    choosing = MLA(4, 16, 8, 8, 8, RoPE(), index=LightningIndex(2, 8, top_k=5))
    graph = Decoder(64, 32, 1, Block(choosing, MLP(48))).graph()
    with pytest.raises(WeftError, match="target transformers has no cache for the keys of a lightning index"):
        lower_sides(forms(graph, "transformers"))


def test_queries_of_the_batch_are_batched() -> None:
    assert all(is_batched(n) for n in graph_of("dense").nodes if n.op.name == "attention")


@pytest.mark.parametrize(("source", "operand"), [("a", "a"), ("a * b", "(a * b)"), ("(a - 1)", "(a - 1)"), (4, "4")])
def test_operands_with_spaces_get_parentheses(source: object, operand: str) -> None:
    assert parenthesize(source) == operand


def test_relative_attention_computes_visible_keys_and_distances_once() -> None:
    graph = generated.graph_of("variant/relative")
    (lowered,) = lower_sides(forms(graph, "transformers"))
    count = sum(n.op.name == "relative_attention" for n in lowered.graph.nodes)
    texts = [s.text for s in lowered.base.statements]
    calls = [t for t in texts if t.startswith("relative_attention(")]
    assert len(calls) == count > 1 and all(t.endswith(".transpose(1, 2).flatten(2)") for t in calls)
    assert texts.count("visible({0}, {1})") == texts.count("key_distances({0}, {1})") == 1
    assert sum(".update(" in t for t in texts) == count


def lower_windows(*windows: int | None, keep_first: int = 0) -> LoweredModel:
    blocks = [Block(Attention(4, window=w), GatedMLP(48), RMSNorm()) for w in windows]
    graph = Decoder(60, 32, blocks).graph()
    for node in graph.nodes:
        if node.op.name == "attention" and keep_first:
            node.attrs["keep_first"] = keep_first
    return lower_sides(forms(graph, "transformers"))[0]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("dense", "create_causal_mask(self.config, {0}, {1}, {2}, {3})"),
        ("encoder", "create_bidirectional_mask(self.config, {0}, {1})"),
    ],
)
def test_single_mask_is_computed_by_transformers(name: str, call: str) -> None:
    lowered = base_of(name).lowered
    assert [s.text for s in lowered.base.statements].count(call) == 1 and lowered.masks == ""
    (mask,) = lowered.emitter.masks.values()
    assert len(mask.nodes) == sum(n.op.name == "attention" for n in lowered.graph.nodes)


def test_kinds_of_masks_are_computed_together() -> None:
    lowered = base_of("windows").lowered
    assert [(mask.kind, len(mask.nodes)) for mask in lowered.emitter.masks.values()] == [
        ("sliding_attention", 2),
        ("full_attention", 1),
    ]
    assert ast.parse(lowered.masks)
    assert '"sliding_attention": create_sliding_window_causal_mask(*given),' in lowered.masks
    assert '"full_attention": create_causal_mask(*given),' in lowered.masks
    texts = [s.text for s in lowered.base.statements]
    assert '{0}["sliding_attention"]' in texts and '{0}["full_attention"]' in texts


def test_second_window_is_a_condition_of_positions() -> None:
    lowered = lower_windows(3, 5)
    kinds = {mask.kind: mask.condition for mask in lowered.emitter.masks.values()}
    assert set(kinds) == {"sliding_attention", "window_keys"} and kinds["sliding_attention"] == ""
    assert "q, k = q - first[batch], k - first[batch]" in lowered.masks  # left-padded rows
    assert "and_mask_function=window_keys" in lowered.masks
    config = SimpleNamespace(**lowered.fields.values)
    shown = [[eval(kinds["window_keys"], {"q": q, "k": k, "config": config}) for k in range(8)] for q in range(8)]
    assert all(shown[q][k] == (q - k < 5) for q in range(8) for k in range(q + 1))


def test_recurrences_share_a_padding_mask() -> None:
    lowered = base_of("mamba").lowered
    assert [mask.kind for mask in lowered.emitter.masks.values()] == ["linear_attention"]
    assert '"linear_attention": create_recurrent_attention_mask(*given[:4]),' in lowered.masks
