"""Models of every kind of layer learn a text: no NaN, less than a unigram model knows, and back into the graph.

``WEFT_TESTS=all`` trains them longer as `make test`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import weft
from weft import Attention, Block, Decoder, GatedMLP, LinearAttention, Mamba, Mamba2, MoE, RMSNorm, RoPE
from weft.ir import interpret

from .sampling import ALL, others_long

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DIM, LENGTH, BATCH, STEPS = 32, 32, 8, 240
norm, ffn = RMSNorm(1e-5), GatedMLP(64)
mamba, heads = Mamba(inner=64, state=8), Mamba2(inner=64, heads=4, state=8)
linear = LinearAttention(heads=4, rope=RoPE(10_000))
local = Attention(heads=4, kv_heads=2, rope=RoPE(10_000), window=16, sinks=True)
experts = MoE(4, hidden=32, k=2)


def differential() -> Any:
    """The attention of examples/differential.py."""
    spec = importlib.util.spec_from_file_location("differential", EXAMPLES / "differential.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DifferentialAttention(heads=4, rope=RoPE(10_000), start=0.2)


def decoder(*layers: tuple[Any, Any]) -> Decoder:
    return Decoder(vocab=128, dim=DIM, layers=[Block(*layer, norm=norm) for layer in layers], tie_embeddings=True)


CASES = {  # the model, the largest rate of its Adam, and the steps in a short run
    "mamba": (decoder((mamba, ffn)), 3e-2, 120),
    "mamba-2": (decoder((heads, ffn)), 3e-2, 120),
    "differential attention": (decoder((differential(), ffn)), 2e-2, 240),
    "linear attention": (decoder((linear, ffn)), 2e-2, 120),
    "experts": (decoder((local, experts)), 1e-2, 120),
    "hybrid": (decoder((mamba, ffn), (local, experts), (heads, ffn)), 1e-2, 120),
}


@pytest.fixture(scope="module")
def codes() -> torch.Tensor:
    """The first 60,000 characters of the text of the training examples."""
    text = (EXAMPLES / "texts" / "kings.txt").read_bytes()[:60_000]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(net: torch.nn.Module, codes: torch.Tensor, rate: float, steps: int) -> list[float]:
    """Train `net` by Adam at a rate that falls from `rate` to 0, and return the loss of every step."""
    random, windows, losses = torch.Generator().manual_seed(0), codes.unfold(0, LENGTH + 1, 1), []
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (BATCH,), generator=random)]
        loss = F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", others_long(CASES, 2))
def test_trained_model_beats_unigrams_and_returns_to_its_graph(name: str, codes: torch.Tensor) -> None:
    model, rate, short = CASES[name]
    net = weft.torch(model)
    losses = train(net, codes, rate, STEPS if ALL else short)
    chances = codes.bincount()[codes.bincount() > 0] / len(codes)
    unigram = -float((chances * chances.log()).sum())
    assert np.isfinite(losses).all()
    assert np.mean(losses[-20:]) < 0.9 * unigram

    graph = weft.with_weights(model.graph(), net.state_dict())
    ids = codes[None, :LENGTH]
    feeds = {"input_ids": ids.numpy(), "position_ids": np.arange(LENGTH)[None]}
    want = interpret(graph, {n: feeds[n] for n in graph.inputs})["logits"]
    with torch.no_grad():
        got = net.double()(ids).numpy()
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()  # norms and angles of the module are in f32
