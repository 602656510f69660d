"""Prompts that decode steps read, in pieces: models of the zoo whose step does, of which `make test` takes a quarter,
against the one pass of the module."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft import MLA, ALiBi, GatedMLP, LayerNorm, Mamba, MoE, RMSNorm, RoPE
from weft.backends.torch.kernels.shared import launch
from weft.frontends.dsl import Decoder
from weft.ir import Graph

from ...e2e.random_models import strong
from ...lowered import build_module, build_step
from ...passes.zoo import TRIED
from ...passes.zoo_variants import BIASED, HIDDEN, attends, decoder, feeds
from ...sampling import each
from .decode.test_lower_step import reason
from .generated import assert_close, call, graph_of, module_of, tolerance

CUTS = (0, 5, 6, 11, 12)
NAMES = [n for n in TRIED if not n.startswith("cached/")]
MODELS: dict[str, Decoder] = {
    "norms of q and k": attends(qk_norm=RMSNorm()),
    "biases, layer norm": decoder(attends(**BIASED).block.attn, GatedMLP(HIDDEN, bias=True), norm=LayerNorm()),
    "sinks, cap": attends(sinks=True, softcap=2.0),
    "ALiBi": attends(rope=None, bias=ALiBi()),
    "chunks": attends(pattern="chunked", stride=3),
}


def tokens(length: int = CUTS[-1]) -> Tensor:
    return torch.randint(1, 9, (2, length), generator=torch.Generator().manual_seed(3))


def in_pieces(graph: Graph, module: Any, ids: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """The logits [batch, seq, vocab] of all tokens, read by the step from cut to cut."""
    step, made = build_step(graph, module), []
    with torch.inference_mode():
        cache = module.new_cache(len(ids), ids.shape[1])
        for a, b in itertools.pairwise(cuts):
            at = torch.arange(a, b).expand(len(ids), -1)
            made.append(step(ids[:, a:b], at, cache))
        cache.length = cuts[-2]
        last = torch.tensor([0, b - a - 1])
        chosen = step(ids[:, a:b], at, cache, last)
    torch.testing.assert_close(chosen[:, 0], made[-1][torch.arange(2), last], rtol=1e-4, atol=1e-5)
    return torch.cat(made, 1)


def read(name: str) -> bool:
    """Return whether the step of the model of the zoo reads prompts."""
    return not reason(name) and hasattr(build_step(graph_of(name), module_of(name)), "reads_prompts")


@pytest.mark.halved
@pytest.mark.parametrize("name", each(4, NAMES, 1))
def test_prompts_in_pieces_agree_with_one_pass(name: str) -> None:
    if read(name):
        (whole, *_) = call(module_of(name), {"input_ids": tokens()})
        made = in_pieces(graph_of(name), module_of(name), tokens(), CUTS)
        assert_close(made, whole.double().numpy(), tolerance(graph_of(name), torch.float32))


@pytest.mark.long
def test_most_dense_models_read_prompts_by_their_step() -> None:
    """So that the test above does not pass by having nothing to do."""
    names = each(5, NAMES)
    assert 5 * sum(map(read, names)) > len(names)


@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize(("cuts", "name"), each(2, itertools.product(((0, 6, 8), (0, 70, 74)), MODELS)))
def test_prompt_kernels_agree_with_the_module(
    name: str, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens by the kernels of steps, many by products and the kernels for prompts."""
    monkeypatch.setattr(launch, "INTERPRETED", True)
    graph = strong(replace(MODELS[name], layers=1).graph())
    module, ids = build_module(graph).eval(), tokens(cuts[-1])
    (whole, *_) = call(module, {"input_ids": ids})
    made = in_pieces(graph, module, ids, cuts)
    assert_close(made, whole.double().numpy(), tolerance(graph, torch.float32))


@pytest.mark.parametrize(
    "model",
    [attends(window=3), feeds(MoE(4, HIDDEN, 2)), decoder(Mamba(21, 5), None), decoder(MLA(3, 9, 5, 4, 7, RoPE()))],
)
def test_rolling_routed_and_recurrent_models_step_one_token_at_a_time(model: Decoder) -> None:
    graph = strong(model.graph())
    step: Any = build_step(graph, build_module(graph))
    assert not hasattr(step, "reads_prompts")
