"""Initial weights by a scheme: their deviations, what stays as it is, and what muP promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft import Attention, Block, Decoder, GatedMLP, Initialized, MoE, RMSNorm, RoPE
from weft.frontends.app.api.initialization import Scheme
from weft.ir.recipes import Normal

DIM, LAYERS, STD = 32, 3, 0.05


def decoder(dim: int = DIM, ffn: Any = None, **more: Any) -> Decoder:
    block = Block(Attention(heads=dim // 8, rope=RoPE()), ffn or GatedMLP(2 * dim), norm=RMSNorm())
    return Decoder(vocab=40, dim=dim, layers=LAYERS, block=block, **more)


def deviations(model: Any) -> dict[str, float]:
    return {n: p.recipe.std for n, p in model.graph.params.items() if isinstance(p.recipe, Normal)}


def test_residual_projections_are_scaled_by_depth() -> None:
    found = deviations(weft.initialize(decoder(), "depth", STD))
    written = {name for name in found if name.endswith(("attn.o.weight", "ffn.down.weight"))}
    assert len(written) == 2 * LAYERS
    assert {found[name] for name in written} == {STD / math.sqrt(2 * LAYERS)}
    assert {std for name, std in found.items() if name not in written} == {STD}


def test_experts_and_encoder_decoders() -> None:
    found = deviations(weft.initialize(decoder(ffn=MoE(4, 48, 2)), "depth", STD))
    assert found["layers.0.ffn.experts.down"] == STD / math.sqrt(2 * LAYERS) < found["layers.0.ffn.experts.up"]
    assert found["layers.0.ffn.router.weight"] == 0.02  # no scheme's


def test_fan_in() -> None:
    found = deviations(weft.initialize(decoder(), "fan-in", STD))
    assert (found["embed.weight"], found["lm_head.weight"]) == (STD, DIM**-0.5)
    assert found["layers.1.ffn.down.weight"] == (2 * DIM) ** -0.5


def test_the_numbers_have_the_deviation() -> None:
    model = weft.initialize(decoder(dim=64), "plain", STD)
    values = model.graph.params["layers.0.ffn.up.weight"].recipe.evaluate(model.graph.reader)
    assert abs(values.std() / STD - 1) < 0.05


def test_mup_at_the_width_it_was_tuned_for_is_plain() -> None:
    assert deviations(weft.initialize(decoder(), "mup", STD, DIM)) == deviations(
        weft.initialize(decoder(), "plain", STD)
    )
    assert set(weft.learning_rates(decoder().graph(), DIM).values()) == {1.0}


def test_mup_keeps_the_step_of_the_logits() -> None:
    """One step of Adam moves the logits of a model eight times as wide about as far; with plain weights and one rate
    for all it moves them several times as far (Yang 2021, figure 5)."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 40, (4, 32)))

    def moved(dim: int, scheme: Scheme) -> float:
        model = weft.initialize(decoder(dim), scheme, 0.1, 32)
        rates = weft.learning_rates(model, 32) if scheme == "mup" else {}
        net = weft.torch(model)
        groups = [{"params": [p], "lr": 1e-2 * rates.get(name, 1.0)} for name, p in net.named_parameters()]
        before = net(ids).detach()
        optimizer = torch.optim.Adam(groups)
        torch.nn.functional.cross_entropy(net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        return float((net(ids).detach() - before).std())

    assert moved(256, "mup") / moved(32, "mup") < 2 < 3 < moved(256, "plain") / moved(32, "plain")


def test_names_of_rates_are_those_of_the_module() -> None:
    model = weft.initialize(decoder(), "mup", width=16)
    assert {name for name, _ in weft.torch(model).named_parameters()} <= set(weft.learning_rates(model, 16))


def test_a_module_may_have_its_own() -> None:
    """Below it everything that has no initial values of its own; the names are those without it."""
    graph = decoder(ffn=Initialized(GatedMLP(64), weft.uniform(0.5))).graph()
    assert set(graph.params) == set(decoder(ffn=GatedMLP(64)).graph().params)
    text = str(graph)
    assert text.count("uniform(") == 3 * LAYERS and "uniform([64, 32], low=-0.5, high=0.5" in text
    assert "Initialized(module=GatedMLP(hidden=64), init=uniform(0.5))" in str(
        decoder(ffn=Initialized(GatedMLP(64), weft.uniform(0.5)))
    )


def test_explicit_initialization_is_kept() -> None:
    found = deviations(weft.initialize(decoder(ffn=Initialized(GatedMLP(64), weft.normal(0.5))), "plain", STD))
    assert (found["layers.0.ffn.up.weight"], found["layers.0.attn.q.weight"]) == (0.5, STD)
    with pytest.raises(weft.WeftError, match="no matrix is initialized as N"):
        weft.initialize(weft.initialize(decoder(), "fan-in", STD), "depth")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"scheme": "xavier"}, "unknown scheme 'xavier' of initialization; known are plain, depth, fan-in, mup"),
        ({"std": 0.0}, "std=0.0 must be positive"),
        ({"scheme": "mup", "width": 0}, "width=0 must be positive"),
    ],
)
def test_initialization_refuses_bad_arguments(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(weft.WeftError, match=told):
        weft.initialize(decoder(), **arguments)


def test_checkpoints_have_no_random_initialization(smollm2_gguf: Any) -> None:
    with pytest.raises(weft.WeftError, match="initialize needs an architecture without a checkpoint"):
        weft.initialize(smollm2_gguf)
    with pytest.raises(weft.WeftError, match=r"embed\.weight is both the embedding and the head"):
        weft.initialize(decoder(tie_embeddings=True), "mup")
