"""The plan of pipeline stages: modules in order, or the reason for one stage."""

from __future__ import annotations

from typing import Any

import pytest

from weft import Attention, Block, Decoder, GatedMLP, LearnedPositions, RMSNorm
from weft.backends.torch.transformers.engines.pipeline import plan_pipeline
from weft.backends.torch.transformers.lower.lower_base_and_head import lower_sides
from weft.backends.torch.transformers.modeling.base import BaseModel
from weft.backends.torch.transformers.modeling.modeling_file import write_modeling

from .....lowered import forms
from ..tiny import base_of

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
