"""A prompt run through a small model: attention weights, predictions and expert counts."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import pytest

from weft import Attention, Block, Decoder, MoE, RMSNorm, load_source
from weft.backends.viz.panels.prompts import check_prompt, expose_choices, run_prompt
from weft.ir import Graph
from weft.ir.errors import WeftError

IDS = [3, 1, 4, 1, 5]


def build_graph(context: int | None = 8, **attention: object) -> Graph:
    block = Block(Attention(4, 2, **attention), MoE(3, 16, 2), RMSNorm())  # type: ignore[arg-type]  # of any field
    graph: Graph = load_source(Decoder(9, 16, 1, block, context=context)).graph
    return graph


def decode(ids: Sequence[int]) -> str:
    return "".join(" abcdefgh"[i] for i in ids)


def test_run_reports_weights_predictions_and_loads() -> None:
    graph, steps = build_graph(), list[tuple[int, int]]()
    data = run_prompt(graph, IDS, decode, lambda done, total: steps.append((done, total)))
    nodes = len(expose_choices(graph)[0])
    assert steps == [(i + 1, nodes) for i in range(nodes)]
    (layer,) = data["layers"]
    assert (layer["heads"], layer["causal"], layer["where"]) == (4, True, "layer 0")
    packed = np.frombuffer(base64.b64decode(layer["weights"]), np.uint8)
    assert packed.size == 4 * 5 * 6 // 2
    assert packed.reshape(4, 15)[:, 0].tolist() == [255] * 4  # the first token sees itself only
    assert sum(data["experts"][0]["counts"]) == 2 * len(IDS)


def test_prompts_that_do_not_fit_are_refused() -> None:
    graph = build_graph()
    check_prompt(graph, 8)
    with pytest.raises(WeftError, match="the prompt has no tokens: give a longer text"):
        check_prompt(graph, 0)
    with pytest.raises(WeftError, match=r"the prompt has 9 tokens, but .* supports at most 8: shorten it"):
        check_prompt(graph, 9)
    long = build_graph(context=None)
    most = 865  # 4 heads · 865 · 866 / 2 ≤ 1,500,000 < 4 · 866 · 867 / 2
    check_prompt(long, most)
    with pytest.raises(WeftError, match=f"with 4 heads at most {most} fit a page: shorten it"):
        check_prompt(long, most + 1)
