"""Folders of the zoo and of random architectures, loaded by transformers, against the float64 interpreter: at once, by
both attention functions, in chunks and tokens with a cache, in rows that are padded on the left. `make test` tries a
quarter of the decoders, a third of the encoders and half of the examples."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.backends.torch.program.stateful_nodes import find_subset_node
from weft.frontends.app.api.source.sources import load_source
from weft.ir import Graph

from ....passes.zoo import TRIED, ZOO
from ....sampling import ALL, each
from .folders import COMPETES, PADDING, error, feeds_of, graph_of, lowered, model_of, ops_of, wanted

BOUND = 1e-4
EXAMPLES = Path(__file__).parents[4] / "examples"
SMALL = (  # the translator is tested beside other encoder-decoders
    *("alternating", "differential", "hybrid", "parallel_block", "shared_layers", "squared_relu"),
    *("tiny_bert", "tiny_gpt"),
)
KINDS = ("preset/", "variant/", "family/")
RANDOM = 200 if ALL else 30


@functools.cache
def kinds() -> dict[str, str]:
    """The kinds of graphs of the zoo by name, without those that the target refuses (chosen tokens or keys)."""
    graphs = {n: ZOO[n]() for n in TRIED if n.startswith(KINDS)}
    refused = {n for n, graph in graphs.items() if find_subset_node(graph) or "lightning_index" in ops_of(graph)}
    return {n: graph.meta["kind"] for n, graph in graphs.items() if n not in refused}


def of_kind(kind: str) -> list[str]:
    return [n for n, known in kinds().items() if known == kind]


def decoders() -> list[str]:
    return of_kind("decoder") + [
        f"random/{i}"
        for i in range(RANDOM + 1)
        if i != 8  # whose numbers grow beyond f64
    ]


# An encoder whose attention is causal: not lowered for this target yet.
UNSUPPORTED = ("family/clip-text",)


def encoders() -> list[str]:
    return [n for n in of_kind("encoder") if n not in UNSUPPORTED] + [f"encoder/{i}" for i in range(RANDOM)]


def attention_functions(model: Any, graph: Graph) -> list[str]:
    """Those that compute the attentions of a model; the last stays set."""
    if "attention" not in ops_of(graph):
        return [""]
    return ["sdpa", "eager"] if model._supports_sdpa else ["eager"]


@pytest.mark.halved
@pytest.mark.parametrize("name", each(4, decoders()))
def test_zoo_decoders_agree_with_the_interpreter(name: str, tmp_path: Path) -> None:
    source = graph_of(name)
    graph = lowered(source)
    feeds = feeds_of(source)
    want, ids = wanted(source, feeds)["logits"], torch.from_numpy(feeds["input_ids"]).long()
    model = model_of(graph, tmp_path)
    with torch.no_grad():
        for function in attention_functions(model, graph):
            if function:
                model.set_attn_implementation(function)
            assert error(model(ids).logits, want) <= BOUND
        if COMPETES & ops_of(graph):
            return
        assert error(in_calls(model, ids, (3, 1, 2)), want) <= BOUND
        padded, shown = left_padded(ids)
        positions = (shown.cumsum(-1) - 1).clamp(min=0)
        made = model(padded, attention_mask=shown, position_ids=positions).logits
        assert error(made[:, PADDING:], want) <= BOUND
        made = in_calls(model, padded, (PADDING + 2, 1, 2), attention_mask=shown, position_ids=positions)
        assert error(made[:, PADDING:], want) <= BOUND


def left_padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    nothing = torch.zeros(len(ids), PADDING, dtype=torch.long)
    return torch.cat((nothing, ids), 1), torch.cat((nothing, torch.ones_like(ids)), 1)


def in_calls(model: Any, ids: Tensor, first: tuple[int, ...], **more: Tensor) -> Tensor:
    """Logits of calls of so many tokens, then of one token each, that share a cache."""
    past, made, start = None, [], 0
    for n in (*first, *[1] * (ids.shape[1] - sum(first))):
        given = {}
        if more:
            given = {
                "attention_mask": more["attention_mask"][:, : start + n],
                "position_ids": more["position_ids"][:, start : start + n],
            }
        out = model(ids[:, start : start + n], past_key_values=past, use_cache=True, **given)
        past, start = out.past_key_values, start + n
        made.append(out.logits)
    return torch.cat(made, 1)


@pytest.mark.parametrize("name", each(2, SMALL))
def test_examples_agree_with_the_interpreter(name: str, tmp_path: Path) -> None:
    source = load_source(EXAMPLES / f"{name}.py").graph
    feeds = feeds_of(source, 9)
    graph = lowered(source)
    model = model_of(graph, tmp_path)
    given = {k: torch.from_numpy(v).long() for k, v in feeds.items() if k != "position_ids"}
    (output, want), *_ = wanted(source, feeds).items()
    with torch.no_grad():
        shown = feeds["attention_mask"][..., None] if "attention_mask" in given else np.ones(1)
        assert error(model(**given)[output] * torch.from_numpy(shown), want * shown) <= BOUND
        if output == "logits" and not COMPETES & ops_of(graph):
            assert error(in_calls(model, given["input_ids"], (3, 1, 2)), want) <= BOUND


@pytest.mark.halved
@pytest.mark.parametrize("name", each(3, encoders()))
def test_zoo_encoders_agree_with_the_interpreter(name: str, tmp_path: Path) -> None:
    source = graph_of(name)
    graph = lowered(source)
    feeds = feeds_of(source)
    given = {k: torch.from_numpy(v) for k, v in feeds.items() if not k.startswith("router_noise")}
    model, shown = model_of(graph, tmp_path), given["attention_mask"] != 0
    with torch.no_grad():
        for function in attention_functions(model, graph):
            if function:
                model.set_attn_implementation(function)
            made = model(**given)
            for output, want in wanted(source, feeds).items():
                if output == "aux_loss":
                    continue
                rows = shown[..., None] if want.ndim == 3 else torch.ones(1)
                assert error(made[output] * rows, want * rows.numpy()) <= BOUND
        all_shown = feeds | {"attention_mask": torch.ones_like(given["attention_mask"]).numpy()}
        types = {k: given[k] for k in ("token_type_ids",) if k in given}
        made = model(given["input_ids"], **types).last_hidden_state
        assert error(made, wanted(source, all_shown)["last_hidden_state"]) <= BOUND
