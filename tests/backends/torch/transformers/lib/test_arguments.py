"""Arguments that a model does not name: its cache by either name, those of engines and trainers, and unknown ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from ..folders import error, graph_of, imported, lowered, model_of, tokens_of

NAMES = ("past_key_values", "cache")
KINDS = ("preset/smollm2-135m", "preset/mistral-7b", "preset/mamba-130m", "variant/hybrid", "family/t5-v1.1")


@pytest.mark.parametrize("name", KINDS)
def test_cache_is_accepted_under_both_names(name: str, tmp_path: Path) -> None:
    """transformers 5.24 and newer hand it over as `cache`; a model without it would compute something else."""
    model, rows = model_of(lowered(graph_of(name)), tmp_path), tokens_of(graph_of(name), 2, 7)
    with torch.no_grad():
        want = model(**given(model, rows, rows), use_cache=False).logits
        for key in NAMES:
            cache = new_cache(model)
            made = [model(**given(model, rows, part), **{key: cache}).logits for part in rows.split((4, 1, 2), 1)]
            assert error(torch.cat(made, 1), want) <= 1e-4


@pytest.mark.parametrize("name", KINDS)
def test_other_caches_and_arguments_are_refused(name: str, tmp_path: Path) -> None:
    model, rows = model_of(lowered(graph_of(name)), tmp_path), tokens_of(graph_of(name), 1, 4)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({key: new_cache(model) for key in NAMES}, "give one cache, as past_key_values or as cache"),
        ({"past_key_values": ((rows, rows),)}, "past_key_values must be a Cache of transformers, not a tuple"),
        ({"cache": ((rows, rows),)}, "past_key_values must be a Cache of transformers, not a tuple"),
        ({"cache_params": DynamicCache()}, "the model has no argument cache_params: leave it out"),
        ({"layer_past": rows, "mems": [rows]}, "the model has no argument layer_past, mems: leave it out"),
    ]
    for more, message in wrong:
        with pytest.raises(TypeError, match=re.escape(message)):
            model(**given(model, rows, rows), **more)


def test_encoders_refuse_caches(tmp_path: Path) -> None:
    model, ids = model_of(lowered(graph_of("preset/bert-base")), tmp_path), torch.tensor([[1, 2, 3]])
    for key in NAMES:
        with pytest.raises(TypeError, match=f"the model has no argument {key}: leave it out"):
            model(ids, **{key: DynamicCache()})
    assert torch.equal(model(ids, use_cache=False)[0], model(ids, cache=None)[0])


def test_arguments_of_engines_and_trainers_are_ignored(tmp_path: Path) -> None:
    """Those that attention functions and losses read, and what stands for nothing."""
    model, ids = model_of(lowered(graph_of("preset/smollm2-135m")), tmp_path), torch.tensor([[1, 2, 3, 4]])
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    more: dict[str, Any] = {
        **{"num_items_in_batch": torch.tensor(3), "attention_instances": {}, "seq_idx": torch.zeros(1, 4)},
        **{"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 4, "max_length_k": 4},
        **{"token_type_ids": torch.zeros_like(ids), "output_attentions": False, "return_dict": True},
    }
    with torch.no_grad():
        assert torch.equal(model(ids, **more).logits, model(ids).logits)
        assert abs(model(ids, labels=ids, **more).loss - model(ids, labels=ids).loss) < 1e-6


def test_masks_accept_the_cache_under_both_names(tmp_path: Path) -> None:
    """`generate` lets the model make its masks before a call that is compiled."""
    model, ids = model_of(lowered(graph_of("variant/hybrid")), tmp_path), tokens_of(graph_of("variant/hybrid"), 1, 5)
    masks = imported(tmp_path).attention_masks
    cache = new_cache(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(ids, cache=cache)
        embeds = model.get_input_embeddings()(ids[:, :2])
        first, second = (masks(model.config, embeds, None, **{key: cache}) for key in NAMES)
    assert first["full_attention"].shape[-1] == 7
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))


def given(model: Any, source: Tensor, part: Tensor) -> dict[str, Tensor]:
    """Return a call with tokens; those of an encoder-decoder answer a source."""
    return {"input_ids": source, "decoder_input_ids": part} if model.config.is_encoder_decoder else {"input_ids": part}


def new_cache(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    return EncoderDecoderCache(cache, DynamicCache()) if model.config.is_encoder_decoder else cache
