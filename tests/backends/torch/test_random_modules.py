"""Random architectures as modules: however a text is cut into calls, steps and autocast among them, as interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.ir import Graph, interpret
from weft.passes import Trace
from weft.passes.library.target.rope_length import RopeLength

from ...e2e.random_models import LENGTH, VOCAB, Drawn, strong
from ...lowered import build_module, build_step, write_step
from .generated import assert_close, call, tolerance

SEEDS = (1001, 1004, 1007, 1008, 1009, 1010, 1022)  # repeated layers, norms without some weights, states, windows
SOURCE = 9  # tokens that encoders read
DRAWN = torch.Generator().manual_seed(5)
IDS = torch.randint(0, VOCAB, (2, LENGTH), generator=DRAWN)
TEXTS = {"input_ids": IDS, "position_ids": torch.arange(LENGTH).expand(2, -1)}
SOURCES = {
    "encoder_input_ids": torch.randint(0, VOCAB, (2, SOURCE), generator=DRAWN),
    "encoder_attention_mask": torch.ones(2, SOURCE, dtype=torch.long),
}


def drawn(seed: int, kind: str = "decoder") -> Graph:
    graph = strong(getattr(Drawn(seed), kind)().graph())
    RopeLength(LENGTH).run(graph, Trace())
    return graph


def meaning(graph: Graph) -> NDArray[Any]:
    """The main output of one pass, noise of routers zero, nothing masked."""
    known = TEXTS | SOURCES | {"attention_mask": torch.ones_like(IDS), "token_type_ids": torch.zeros_like(IDS)}
    sizes = {"batch": 2, "seq": LENGTH, "source": SOURCE}
    zeros = {n: np.zeros(v.type.concrete(sizes)) for n, v in graph.inputs.items() if n not in known}
    given = {n: t.numpy() for n, t in known.items() if n in graph.inputs}
    return next(iter(interpret(graph, given | zeros).values()))


def calls(module: Any, cuts: tuple[int, ...], sources: dict[str, Tensor] | None = None) -> Tensor:
    """The logits of calls that share a cache, each of so many tokens; `sources` are given to the first."""
    cache, made = module.new_cache(2, LENGTH), []
    for ids in IDS.split(cuts, 1):
        made.append(call(module, {"input_ids": ids, "cache": cache, **(sources or {})})[0])
        sources = None
    return torch.cat(made, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_decoders_in_pieces_agree_with_the_interpreter(seed: int) -> None:
    graph = drawn(seed)
    module, want, bound = build_module(graph).eval(), meaning(graph), 4 * tolerance(graph, torch.float32)
    for cuts in ((LENGTH,), (5, 1, LENGTH - 6), (1,) * LENGTH):
        assert_close(calls(module, cuts), want, bound)
    if write_step(graph)[0]:
        step, cache = build_step(graph, module), module.new_cache(2, LENGTH)
        with torch.inference_mode():
            call(module, {"input_ids": IDS[:, :7], "cache": cache})
            made = [step(IDS[:, i : i + 1], torch.full((2, 1), i), cache) for i in range(7, LENGTH)]
        assert_close(torch.cat(made, 1), want[:, 7:], bound)


def test_most_random_decoders_have_a_decode_step() -> None:
    """So that the steps above are not tested by there being none; what has none is a model all the same."""
    assert [seed for seed in SEEDS if not write_step(drawn(seed))[0]] == [1022]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's RMSNorm of bf16 by f32 weights
@pytest.mark.parametrize("seed", SEEDS)
def test_autocast_works_with_a_cache(seed: int) -> None:
    """Products in bf16, the cache in f32: near what calls without autocast give."""
    graph, cuts = drawn(seed), (5, 1, LENGTH - 6)
    module = build_module(graph).eval()
    with torch.autocast("cpu", torch.bfloat16):
        got = calls(module, cuts)
    assert_close(got, calls(module, cuts).numpy(), 4 * tolerance(graph, torch.bfloat16))


@pytest.mark.parametrize("seed", [2067])
def test_random_encoders_agree_with_the_interpreter(seed: int) -> None:
    """One whose first layer stands with the model, and whose others are called in a loop."""
    graph = drawn(seed, "encoder")
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    got, *_ = call(build_module(graph), given)
    assert_close(got, meaning(graph), 4 * tolerance(graph, torch.float32))


@pytest.mark.parametrize("seed", [3001, 3002, 3035, 3057])
def test_random_encoder_decoders_agree_with_the_interpreter(seed: int) -> None:
    """Encoders with rotary and relative positions, shared frequencies, or a second output are not asked for again."""
    graph = drawn(seed, "encoder_decoder")
    module, bound = build_module(graph).eval(), 4 * tolerance(graph, torch.float32)
    for cuts in ((LENGTH,), (5, 1, LENGTH - 6)):
        assert_close(calls(module, cuts, SOURCES), meaning(graph), bound)
