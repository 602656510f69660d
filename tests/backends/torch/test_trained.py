"""Weights from a module go back into its graph: the interpreter, passes and a second module see what was trained."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft import Attention, Block, Decoder, GatedMLP, LearnedPositions, Mamba, MoE, RMSNorm, RoPE, WeftError
from weft.backends.torch.lower.identifiers import map_parameter_names
from weft.frontends.app.api.modules import with_weights
from weft.ir import interpret

from ...lowered import build_module
from ...passes.zoo import TRIED
from ...sampling import each
from .generated import graph_of

heads = Attention(heads=4, rope=RoPE(10_000), qk_norm=RMSNorm(1e-5))
MODELS = {
    "rope": Decoder(vocab=37, dim=32, layers=2, block=Block(heads, GatedMLP(56), norm=RMSNorm(1e-5)), context=32),
    "tied": Decoder(
        vocab=37,
        dim=32,
        layers=2,
        block=Block(Attention(heads=4, qkv_bias=True), MoE(4, hidden=24, k=2), norm=RMSNorm(1e-5)),
        positions=LearnedPositions(32),
        tie_embeddings=True,
    ),
    "mamba": Decoder(vocab=37, dim=32, layers=2, block=Block(Mamba(inner=64), GatedMLP(56), norm=RMSNorm(1e-5))),
}


def moved(model: Decoder, dtype: torch.dtype = torch.float32) -> Any:
    """The module of a model, every weight moved by a random step."""
    net = build_module(model.graph(), dtype=dtype)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=random, dtype=dtype), alpha=0.05)
    return net


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_graph_with_trained_weights_agrees_with_the_module(model: Decoder, rng: np.random.Generator) -> None:
    net = moved(model, torch.float64)
    graph = with_weights(model.graph(), net.state_dict())
    ids = rng.integers(0, 37, (2, 11))
    feeds = {"input_ids": ids, "position_ids": np.broadcast_to(np.arange(11), (2, 11))}
    want = interpret(graph, {name: feeds[name] for name in graph.inputs})["logits"]
    with torch.no_grad():
        got = net(torch.from_numpy(ids)).numpy()
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()  # norms and angles of the module are in f32
    before = interpret(model.graph(), {name: feeds[name] for name in graph.inputs})["logits"]
    assert np.abs(want - before).max() > 0.1 * np.abs(want).max()  # and they did move


def test_second_module_gets_the_trained_weights() -> None:
    net = moved(MODELS["tied"])
    state = net.state_dict()
    again = weft.torch(with_weights(MODELS["tied"].graph(), state)).state_dict()
    assert again.keys() == state.keys()
    assert all(torch.equal(again[k], state[k]) for k in state)


def test_weights_are_copied() -> None:
    net = moved(MODELS["rope"])
    graph = with_weights(MODELS["rope"].graph(), net.state_dict())
    kept = graph.params["embed.weight"].recipe.evaluate(graph.reader).copy()
    with torch.no_grad():
        net.embed.weight.zero_()
    assert np.array_equal(graph.params["embed.weight"].recipe.evaluate(graph.reader), kept)


def test_bf16_weights_return_bit_identical() -> None:
    net = moved(MODELS["rope"], torch.bfloat16)
    graph = with_weights(MODELS["rope"].graph(), net.state_dict())
    got = graph.params["embed.weight"].recipe.evaluate(graph.reader)
    assert got.dtype == np.float32 and np.array_equal(got, net.embed.weight.detach().float().numpy())


def test_passes_rewrite_trained_weights(rng: np.random.Generator) -> None:
    """Heads that were trained to be equal in pairs are merged without loss."""
    model = MODELS["rope"]
    net = moved(model)
    with torch.no_grad():
        for layer in net.layers:
            for linear in (layer.attn.k, layer.attn.v):
                pairs = linear.weight.view(2, 2, 8, 32)
                pairs[:, 1] = pairs[:, 0]
    graph = with_weights(model.graph(), net.state_dict())
    fewer = weft.torch(weft.run_passes(graph, "mha-to-gqa{kv_heads=2}"))
    assert fewer.state_dict()["layers.0.attn.k.weight"].shape == (16, 32)
    ids = torch.from_numpy(rng.integers(0, 37, (2, 11)))
    with torch.no_grad():
        want, got = net(ids), fewer(ids)
    torch.testing.assert_close(got, want, rtol=0, atol=float(64 * 2**-23 * want.abs().max()))


def test_mismatched_weights_are_named() -> None:
    graph, state = MODELS["rope"].graph(), dict(moved(MODELS["rope"]).state_dict())
    with pytest.raises(WeftError, match=r"has extra, but graph .* does not \(1 unknown in total\)"):
        with_weights(graph, {**state, "extra": torch.zeros(1)})
    with pytest.raises(WeftError, match=re.escape("embed.weight is [3, 32] in the state_dict, but [37, 32] in graph")):
        with_weights(graph, {**state, "embed.weight": torch.zeros(3, 32)})
    del state["final_norm.weight"]
    with pytest.raises(WeftError, match=r"has no final_norm\.weight"):
        with_weights(graph, state)


def test_training_a_module_does_not_change_its_graph() -> None:
    """Also where the weights are computed by a pass, or as wide as the reader's."""
    state = moved(MODELS["rope"], torch.float64).state_dict()
    graph = with_weights(MODELS["rope"].graph(), state)
    net: Any = build_module(graph, dtype=torch.float64)
    with torch.no_grad():
        net.embed.weight.zero_()
    assert torch.equal(build_module(graph, dtype=torch.float64).state_dict()["embed.weight"], state["embed.weight"])


@pytest.mark.halved
@pytest.mark.parametrize("name", each(3, (n for n in TRIED if not n.startswith(("packed/", "cached/", "example/")))))
def test_trained_weights_of_zoo_modules_return_to_the_graph(name: str) -> None:
    """The parameters of `weft.torch` are those that the graph declares: none folded into another, none left out but
    the noise of routers."""
    graph = graph_of(name)
    state = weft.state_dict(graph)
    moved = {key: tensor + 1 for key, tensor in state.items()}
    trained = with_weights(graph, moved)
    assert trained.params.keys() == graph.params.keys()
    for key, name in map_parameter_names(graph).items():
        param, recipe = graph.params[name], trained.params[name].recipe
        if key in moved and not param.recipe.is_constant:
            assert np.array_equal(recipe.evaluate(trained.reader), moved[key])
        else:  # a table, or tied to another: then its key is that one's
            assert recipe == param.recipe or recipe.key in {*state, key}  # type: ignore[attr-defined]  # a source
