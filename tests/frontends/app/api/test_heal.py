"""weft heal: scales, norms and biases refitted to the original, measured by the float64 meaning of both graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import weft
from weft.frontends.app.api.heal import HOLD_OUT, heal_and_measure
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.formats.weft.model_folder import write_model
from weft.frontends.model import Model
from weft.ir import Graph, interpret
from weft.ir.recipes.blocks import BlockRecipe, Stored
from weft.passes import run_passes

from ....passes.library.quantize.checkpoints import in_memory
from ....sampling import by_turns
from .test_weights import ExactOptions

VOCAB, CONTEXT = 53, 12
ATTENTION = weft.Attention(4, kv_heads=2, rope=weft.RoPE())
MODELS = {
    "tied": weft.Decoder(
        VOCAB, 32, 2, weft.Block(ATTENTION, weft.GatedMLP(48), weft.RMSNorm()), context=64, tie_embeddings=True
    ),
    "mixture": weft.Decoder(VOCAB, 32, 1, weft.Block(ATTENTION, weft.MoE(4, 16, 2), weft.RMSNorm()), context=64),
    "biased": weft.Decoder(
        VOCAB,
        32,
        1,
        weft.Block(weft.Attention(4, qkv_bias=True, out_bias=True), weft.MLP(48, bias=True), weft.LayerNorm()),
        context=64,
    ),
}
QUANTIZE = "quantize{bits=3, group=16, head=4, method=rtn}"
OPTIONS: dict[str, Any] = {"tokens": 4800, "context": CONTEXT, "batch": 8, "rate": 1e-2, "device": "cpu"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """600 tokens: 50 windows."""
    path = tmp_path / "ids.npy"
    np.save(path, np.random.default_rng(3).integers(0, VOCAB, 50 * CONTEXT))
    return path


def original(name: str) -> Graph:
    return in_memory(MODELS[name].graph())


def log_probabilities(graph: Graph, ids: np.ndarray) -> np.ndarray:
    positions = np.arange(ids.shape[1])[None].repeat(len(ids), 0)
    inputs = {"input_ids": ids, "position_ids": positions}
    logits = interpret(graph, {k: v for k, v in inputs.items() if k in graph.inputs})["logits"].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def divergence(first: Graph, second: Graph, ids: np.ndarray) -> float:
    p, q = log_probabilities(first, ids), log_probabilities(second, ids)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    ("name", "prepare"), by_turns(MODELS, ["fold-norm-scale, rotate-residual, rotate-heads, ", ""])
)
def test_the_healed_model_is_closer_to_the_original(name: str, prepare: str, text: Path) -> None:
    if prepare and name != "tied":
        prepare = "fold-norm-scale, "
    first = original(name)
    quantized = run_passes(first, prepare + QUANTIZE)
    result = heal_and_measure(quantized, against=first, text=text, **OPTIONS)
    windows = np.load(text).reshape(-1, CONTEXT)
    held_back = np.arange(len(windows)) % HOLD_OUT == HOLD_OUT // 2
    healed = result.model.graph
    for ids in (windows[~held_back], windows[held_back]):
        assert divergence(first, healed, ids) < 0.9 * divergence(first, quantized, ids)
    # f32 logits of size 10 are exact to 1e-5 or so, of divergences as large as 0.01.
    assert result.before == pytest.approx(divergence(first, quantized, windows[held_back]), rel=5e-3)
    assert result.after == pytest.approx(divergence(first, healed, windows[held_back]), rel=5e-3)
    assert result.improved and result.steps == 50 and result.scales


@pytest.mark.parametrize("name", MODELS)
def test_only_scales_norms_and_biases_change(name: str, text: Path) -> None:
    first = original(name)
    quantized = run_passes(first, QUANTIZE)
    healed = weft.heal(quantized, against=first, text=text, **OPTIONS).graph
    assert healed.params.keys() == quantized.params.keys()
    assert list(map(str, healed.nodes)) == list(map(str, quantized.nodes))
    vectors = {n for n, p in quantized.params.items() if (p.type.rank == 1 and "norm" in n) or n.endswith(".bias")}
    changed = set()
    for param, other in ((param, healed.params[key]) for key, param in quantized.params.items()):
        assert param.type == other.type
        if not isinstance(param.recipe, BlockRecipe):
            before, after = param.recipe.evaluate(quantized.reader), other.recipe.evaluate(healed.reader)
            if not np.array_equal(before, after):
                changed.add(param.name)
            continue
        layout = param.recipe.layout(quantized.reader)
        assert isinstance(other.recipe, BlockRecipe) and other.recipe.layout(healed.reader) == layout
        for part in ("packed", "points"):
            before, after = (
                Stored(p.recipe, part).evaluate(g.reader) for p, g in ((param, quantized), (other, healed))
            )
            np.testing.assert_array_equal(before, after)
        before, after = (Stored(p.recipe, "steps").evaluate(g.reader) for p, g in ((param, quantized), (other, healed)))
        assert not np.array_equal(before, after)
        np.testing.assert_array_equal(after, after.astype(np.float16))
        numbers = other.recipe.evaluate(healed.reader)
        spread = np.repeat(np.divide(after, before, out=np.ones_like(after), where=before != 0), layout.group, -1)
        expected = param.recipe.evaluate(quantized.reader) * spread[..., : numbers.shape[-1]]
        np.testing.assert_allclose(numbers, expected, rtol=1e-6, atol=1e-9)
    assert changed == vectors


@pytest.mark.parametrize(("name", "target"), by_turns(MODELS, ["ort-cpu", "onnx", "torch"]))
def test_healed_folder_compiles_to_the_same_values(
    name: str, target: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "SessionOptions", ExactOptions)
    first = original(name)
    model = rewrite(Model(first, name, name), QUANTIZE)
    healed = weft.heal(model, against=first, text=text, **OPTIONS)
    write_model(healed, tmp_path / "healed")
    again = weft.load_source(tmp_path / "healed")
    assert again.provenance["pipeline"].endswith("; heal")
    ids = np.random.default_rng(1).integers(0, VOCAB, 20)
    exact = log_probabilities(again.graph, ids[None])[0]
    np.testing.assert_array_equal(exact, log_probabilities(healed.graph, ids[None])[0])
    options = {"arithmetic": "f32"} if target == "ort-cpu" else {}
    weft.compile(again, tmp_path / "out", target=target, **options)
    logits = weft.load(tmp_path / "out", trust=target == "torch").logits(ids.tolist())[-1].astype(np.float64)
    found = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(found, exact[-1], rtol=0, atol=5e-5 * np.abs(exact).max())


def test_tied_table_stays_tied(text: Path) -> None:
    first = original("tied")
    quantized = run_passes(first, QUANTIZE)
    embedding = next(node for node in quantized.nodes if node.op.name == "embedding")
    assert len(embedding.inputs[1].users) == 2
    healed = weft.heal(quantized, against=first, text=text, **OPTIONS).graph
    embedding = next(node for node in healed.nodes if node.op.name == "embedding")
    assert len(embedding.inputs[1].users) == 2
    assert {name for name in weft.torch(healed).state_dict() if "head" in name} == set()


def test_equal_options_give_equal_models(text: Path) -> None:
    first = original("tied")
    quantized = run_passes(first, QUANTIZE)
    one, two = (weft.heal(quantized, against=first, text=text, samples=40, **OPTIONS).graph for _ in range(2))
    for name, param in one.params.items():
        np.testing.assert_array_equal(param.recipe.evaluate(one.reader), two.params[name].recipe.evaluate(two.reader))


def test_without_improvement_the_model_is_unchanged(text: Path) -> None:
    first = original("tied")
    quantized = Model(run_passes(first, QUANTIZE), "q", "q")
    result = heal_and_measure(quantized, against=first, text=text, **OPTIONS | {"rate": 1e3})
    assert result.model is quantized and not result.improved and result.after >= result.before


def test_training_ends_at_the_time_limit(text: Path) -> None:
    first = original("tied")
    quantized = run_passes(first, QUANTIZE)
    result = heal_and_measure(quantized, against=first, text=text, **OPTIONS | {"tokens": 10**9, "seconds": 0.5})
    assert 0 < result.steps < 10**4


# -- the command, and bad input


def test_codes_of_8_bits_beside_coarser_ones_keep_their_scales(text: Path) -> None:
    first = original("tied")
    mixed = run_passes(first, "quantize{bits=3, group=16, method=rtn}")
    healed = weft.heal(mixed, against=first, text=text, **OPTIONS).graph
    for name, param in mixed.params.items():
        if isinstance(param.recipe, BlockRecipe):
            same = np.array_equal(
                param.recipe.evaluate(mixed.reader), healed.params[name].recipe.evaluate(healed.reader)
            )
            assert same == (param.recipe.layout(mixed.reader).bits == 8)
    whole = run_passes(first, "quantize{bits=8, group=16, method=rtn}")
    assert heal_and_measure(whole, against=first, text=text, **OPTIONS).scales
