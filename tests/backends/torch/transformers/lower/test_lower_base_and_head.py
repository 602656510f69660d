"""Programs of a base model and its head: where they are cut, and names of shared weights."""

from __future__ import annotations

import pytest

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm
from weft.backends.torch.transformers.lower.lower_base_and_head import lower_sides
from weft.ir import WeftError, ops

from .....lowered import forms
from ....torch.generated import graph_of as zoo_graph
from ..tiny import base_of, lower_model


def test_head_maps_hidden_states_to_logits() -> None:
    lowered = base_of("dense").lowered
    assert lowered.head is not None and lowered.side == ""
    assert list(lowered.base.outputs) == ["last_hidden_state"] and list(lowered.head.outputs) == ["logits"]
    assert lowered.head.inputs == [lowered.hidden] and lowered.hidden.name == "hidden_states"
    assert list(lowered.head.weights) == ["lm_head.weight"] and "lm_head.weight" not in lowered.base.weights
    assert [s.text for s in lowered.head.statements] == ["{1}({0})"]
    assert not set(lowered.head.statements) & set(lowered.base.statements)


def test_encoder_has_no_head() -> None:
    lowered = base_of("encoder").lowered
    assert lowered.head is None and "last_hidden_state" in lowered.base.outputs


def test_soft_cap_of_logits_is_in_the_head() -> None:
    graph = Decoder(60, 32, 1, Block(Attention(4), GatedMLP(48), RMSNorm()), logit_softcap=30.0).graph()
    (lowered,) = lower_sides(forms(graph, "transformers"))
    assert lowered.head is not None and any("final_logit_softcapping" in s.text for s in lowered.head.statements)


def test_tied_head_refers_to_the_embedding() -> None:
    assert base_of("tied").lowered.tied_keys == {"lm_head.weight": "embed_tokens.weight"}
    assert base_of("dense").lowered.tied_keys == {}


def test_encoder_decoder_has_two_sides_with_names_of_the_model() -> None:
    decoder, encoder = lower_sides(forms(zoo_graph("variant/encoder-decoder"), "transformers"))
    assert (decoder.side, encoder.side, encoder.head) == ("decoder", "encoder", None)
    assert decoder.fields is encoder.fields and decoder.head is not None
    assert set(encoder.names.values()) <= set(encoder.full_graph.params)


def test_logits_without_a_linear_map_are_refused() -> None:
    graph = lower_model("dense").full_graph.clone()
    logits = graph.outputs["logits"]
    del graph.outputs["logits"]
    graph.outputs["logits"] = ops.softmax(logits)
    with pytest.raises(WeftError, match="needs logits of a linear map; dense has others: use target torch"):
        lower_sides({"model": graph})
