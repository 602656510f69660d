"""Trainers of models: which parameters decay and at which rates, and models that cannot be trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import weft
from weft import MLA, Attention, Block, Decoder, Encoder, GatedMLP, Mamba, RMSNorm, TrainingSettings
from weft.backends.torch.training.trainer import open_accelerator
from weft.frontends.app.api.training import trainers
from weft.frontends.app.api.training.trainers import Training, check_trainable, choose_device, open_training
from weft.frontends.model import Model
from weft.ir.errors import WeftError

IDS = np.random.default_rng(0).integers(0, 64, 400)
LATENT = MLA(2, rank=16, head_dim=8, rope_dim=4, v_head_dim=8, rope=None)
LAYERS = [
    Block(Mamba(64, state=8), None, RMSNorm()),
    *(Block(attention, GatedMLP(64), RMSNorm()) for attention in (Attention(heads=2), LATENT)),
]
MODEL = Decoder(vocab=64, dim=32, context=64, layers=LAYERS)
SETTINGS = TrainingSettings(steps=4, batch=4, context=16)


def training_of(model: Model, settings: TrainingSettings = SETTINGS) -> Training:
    return open_training(model, IDS, IDS[:100], settings.resolve(model), open_accelerator("cpu", False))


def test_weights_of_products_and_tables_decay_and_states_do_not() -> None:
    trainer = training_of(weft.load_source(MODEL)).trainer
    names = {id(p): name for name, p in trainer.net.named_parameters()}
    decays = {names[id(p)]: group["weight_decay"] for group in trainer.groups for p in group["params"]}
    assert decays.keys() == set(names.values())
    assert {n for n, decay in decays.items() if not decay} == {
        n for n in names.values() if "norm" in n or n.endswith((".bias", "a_log", ".skip", "conv.weight", ".d"))
    }
    assert decays["embed.weight"] == decays["layers.1.attn.q.weight"] == 0.1


def test_mup_scales_the_rates_of_matrices() -> None:
    trainer = training_of(weft.load_source(MODEL), replace(SETTINGS, init="mup", width=8)).trainer
    names = {id(p): name for name, p in trainer.net.named_parameters()}
    factors = {names[id(p)]: group["factor"] for group in trainer.groups for p in group["params"]}
    assert factors["layers.1.attn.q.weight"] == 0.25 and factors["embed.weight"] == factors["final_norm.weight"] == 1


def test_the_graph_of_a_state_dict_has_its_weights() -> None:
    training = training_of(weft.load_source(MODEL))
    state = {name: value + 1 for name, value in training.trainer.net.state_dict().items()}
    graph = training.build_graph(state)
    np.testing.assert_allclose(graph.params["embed.weight"].recipe.evaluate(graph.reader), state["embed.weight"])


def test_models_that_cannot_be_trained_are_refused() -> None:
    encoder = weft.load_source(Encoder(64, 32, 1, Block(Attention(2, causal=False), GatedMLP(32), RMSNorm())))
    with pytest.raises(WeftError, match="an encoder without logits of tokens, and training here needs a decoder"):
        check_trainable(encoder)
    model = weft.load_source(MODEL)
    with pytest.raises(WeftError, match="has caches: train the model before the pass kv-cache"):
        check_trainable(replace(model, graph=weft.run_passes(model.graph, "kv-cache")))
    with pytest.raises(WeftError, match="has no linear weight that is a tensor of a checkpoint as it is"):
        training_of(model, replace(SETTINGS, lora=4))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == "cpu"
    monkeypatch.setattr(trainers, "find_spec", lambda name: None)
    with pytest.raises(WeftError, match=r"training needs the package accelerate: install weft\[train\]"):
        choose_device("cpu")
