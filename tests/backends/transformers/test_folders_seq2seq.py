"""Folders of encoder-decoders, of the zoo and random ones, loaded by transformers, against the float64 interpreter; and
used: generating, training, other sizes, back into weft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.ir import Graph

from ...passes.zoo import ZOO
from .folders import COMPETES, error, feeds_of, graph_of, lowered, model_of, ops_of, wanted
from .test_folders_zoo import ALL, BOUND, attention_functions

RANDOM = 200 if ALL else 30


def both_sides() -> list[str]:
    names = [n for n in ZOO if n.startswith(("preset/", "variant/", "family/"))]
    return [n for n in names if ZOO[n]().meta["kind"] == "encoder-decoder"] + [f"both/{i}" for i in range(RANDOM)]


def source_of(feeds: dict[str, Any]) -> dict[str, Tensor]:
    """The source of a call, as a model for transformers is given it."""
    names = {"encoder_input_ids": "input_ids", "encoder_attention_mask": "attention_mask"}
    return {name: torch.from_numpy(feeds[k]).long() for k, name in names.items()}


@pytest.mark.parametrize("name", both_sides())
def test_encoder_decoders(name: str, tmp_path: Path) -> None:
    graph = graph_of(name)
    feeds = feeds_of(graph)
    want, ids, source = wanted(graph, feeds)["logits"], torch.from_numpy(feeds["input_ids"]).long(), source_of(feeds)
    made = lowered(graph)
    model = model_of(made, tmp_path)
    with torch.no_grad():
        for function in attention_functions(model, made):
            if function:
                model.set_attn_implementation(function)
            assert error(model(**source, decoder_input_ids=ids).logits, want) <= BOUND
        if COMPETES & ops_of(made):
            return
        assert error(in_calls(model, source, ids), want) <= BOUND


def in_calls(model: Any, source: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits of calls of a few tokens that share a cache, and what the encoder made."""
    encoded, past, made, start = model.get_encoder()(**source), None, [], 0
    for n in (3, 1, 2, *[1] * (ids.shape[1] - 6)):
        given = {"encoder_outputs": encoded, "attention_mask": source["attention_mask"], "past_key_values": past}
        out = model(decoder_input_ids=ids[:, start : start + n], use_cache=True, **given)
        past, start = out.past_key_values, start + n
        made.append(out.logits)
    return torch.cat(made, 1)
