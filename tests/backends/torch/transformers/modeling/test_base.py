"""Classes of base models: their names, outputs, and the capabilities that they declare."""

from __future__ import annotations

import pytest

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm
from weft.backends.torch.transformers.lower.lower_base_and_head import lower_sides
from weft.backends.torch.transformers.modeling.base import get_output_class, write_capabilities, write_recorders
from weft.backends.torch.transformers.modeling.modeling_file import write_modeling

from .....lowered import forms
from ....torch.generated import graph_of as zoo_graph
from ..tiny import base_of


def test_layers_have_a_class_each_kind() -> None:
    base = base_of("windows")
    assert (base.name, base.path, base.blocks) == ("TinyModel", "", ["WindowBlock", "WindowBlock", "GlobalBlock"])
    assert base.main_class.name == "TinyModel" and "TinyModel" not in [c.name for c in base.classes]
    assert base.count_field == "num_hidden_layers" and base.block_types == "block_types"
    assert base.kinds == ["sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(("name", "needed"), [("dense", False), ("windows", True), ("mamba", True)])
def test_config_lists_kinds_of_caches_unless_all_are_full(name: str, needed: bool) -> None:
    assert base_of(name).needs_kinds is needed


@pytest.mark.parametrize(("name", "output"), [("dense", "BaseModelOutputWithPast"), ("encoder", "BaseModelOutput")])
def test_output_class_fits_the_outputs(name: str, output: str) -> None:
    assert base_of(name).returned == get_output_class(base_of(name).lowered) == output
    assert base_of(name).extra_outputs == {}


def test_capabilities_of_plain_attention() -> None:
    lines = write_capabilities([base_of("dense")])
    assert "supports_gradient_checkpointing = True" in lines and '_no_split_modules = ["Block"]' in lines
    kinds = ("flash_attn", "sdpa", "flex_attn", "attention_backend")
    assert f"{' = '.join(f'_supports_{kind}' for kind in kinds)} = True" in lines
    assert "_can_compile_fullgraph = True" in lines and not any("stateful" in line for line in lines)


def test_capabilities_without_flash_attention_and_with_states() -> None:
    sinks = Decoder(60, 32, 1, Block(Attention(4, sinks=True), GatedMLP(48), RMSNorm())).graph()
    lines = write_capabilities(write_modeling(lower_sides(forms(sinks, "transformers")), "Tiny", "tiny").bases)
    assert "_supports_flash_attn = _supports_sdpa = False" in lines
    assert "_supports_flex_attn = _supports_attention_backend = True" in lines
    mamba = write_capabilities([base_of("mamba")])
    assert "_is_stateful = True" in mamba and not any("_supports_" in line for line in mamba)


def test_recorded_outputs_are_hidden_states_and_attention_weights() -> None:
    assert write_recorders(base_of("dense")) == [
        '_can_record_outputs = {"hidden_states": Block, "attentions": OutputRecorder(Attention, index=1)}'
    ]
    assert write_recorders(base_of("mamba")) == ['_can_record_outputs = {"hidden_states": Block}']


def test_sides_of_an_encoder_decoder() -> None:
    graph = zoo_graph("variant/encoder-decoder")
    decoder, encoder = write_modeling(lower_sides(forms(graph, "transformers")), "Tiny", "tiny").bases
    assert (decoder.name, encoder.name) == ("TinyDecoder", "TinyEncoder")
    assert (decoder.path, encoder.path) == ("decoder.", "encoder.")
    assert (encoder.count_field, encoder.block_types, encoder.is_second) == (
        "encoder_layers",
        "encoder_block_types",
        True,
    )
    assert decoder.returned == "BaseModelOutputWithPastAndCrossAttentions"
    assert not set(decoder.inner_methods) & set(encoder.inner_methods)
