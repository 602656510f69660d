"""weft.distil: models come closer to their originals, measured by the float64 meaning of both graphs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

import weft
from weft import DistilSettings
from weft.backends.torch.training.batches import Windows
from weft.frontends.app.api.modules import torch as torch_module
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.app.api.training.distil import RATE, choose_parameters, inherit_weights
from weft.frontends.app.api.training.run_folder import Run, RunFolder, RunState
from weft.frontends.model import Model
from weft.ir import Graph, WeftError, interpret
from weft.ir.recipes.blocks import BlockRecipe, Stored
from weft.passes import run_passes

from .....passes.library.quantize.checkpoints import in_memory
from .....sampling import by_turns, others_long
from ..test_weights import ExactOptions

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
SETTINGS = DistilSettings(tokens=4800, context=CONTEXT, batch=8, rate=0.1, layers=0.0, top=0)


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


def distil(
    graph: Graph | weft.Decoder, first: Graph, text: Path, out: str = "run", **settings: Any
) -> tuple[Run, Graph]:
    """A run in a new folder next to `text`, and the graph of its best model."""
    chosen = replace(SETTINGS, **settings)
    run = weft.distil(graph, text.parent / out, chosen, against=first, text=text, device="cpu")
    return run, weft.load_source(run.folder).graph


@pytest.mark.parametrize(
    ("name", "prepare"), others_long(by_turns(MODELS, ["fold-norm-scale, rotate-residual, rotate-heads, ", ""]))
)
def test_a_quantized_model_comes_closer_to_the_original(name: str, prepare: str, text: Path) -> None:
    prepare = "fold-norm-scale, " if prepare and name != "tied" else prepare
    first = original(name)
    quantized = run_passes(first, prepare + QUANTIZE)
    run, trained = distil(quantized, first, text)
    held_out = np.load(run.folder / "held_out.npy")[: 2 * CONTEXT].reshape(-1, CONTEXT)
    for ids in (np.load(text)[: 40 * CONTEXT].reshape(-1, CONTEXT), held_out):
        assert divergence(first, trained, ids) < 0.9 * divergence(first, quantized, ids)
    # f32 logits of size 10 are exact to 1e-5 or so, of divergences as large as 0.01.
    assert run.before == pytest.approx(divergence(first, quantized, held_out), rel=5e-3)
    assert run.best == pytest.approx(divergence(first, trained, held_out), rel=5e-3)
    assert run.steps == 50


@pytest.mark.parametrize("pipeline", others_long(["mha-to-gqa{kv_heads=1}", "prune-layers{layers=[0]}"]))
def test_a_rewritten_model_comes_closer_by_single_layers_and_by_predictions(pipeline: str, text: Path) -> None:
    first = original("tied")
    rewritten = run_passes(first, pipeline)
    run, trained = distil(rewritten, first, text, layers=0.5, rate=0.02, top=16)
    ids = np.load(text)[: 40 * CONTEXT].reshape(-1, CONTEXT)
    assert divergence(first, trained, ids) < 0.8 * divergence(first, rewritten, ids)
    log = (run.folder / "log.csv").read_text()
    assert log.count("layers") == 25 and log.count("predictions") == 25


@pytest.mark.long
def test_layers_that_return_auxiliary_losses_are_trained_alone(text: Path) -> None:
    block = weft.Block(ATTENTION, weft.MoE(4, 16, 2, router=weft.Router(aux_loss=0.01)), weft.RMSNorm())
    first = in_memory(weft.Decoder(VOCAB, 32, 1, block, context=64).graph())
    run, _ = distil(run_passes(first, "mha-to-gqa{kv_heads=1}"), first, text, layers=0.5, rate=0.02)
    assert run.best < run.before


@pytest.mark.long
def test_parameters_with_equal_initial_values_are_not_tied(text: Path) -> None:
    attention = replace(ATTENTION, qk_norm=weft.RMSNorm())
    student = weft.Decoder(VOCAB, 32, 2, weft.Block(attention, weft.GatedMLP(48), weft.RMSNorm()), context=64)
    _, trained = distil(student, original("tied"), text, train=("all",))
    norms = [p.recipe.evaluate(trained.reader) for n, p in trained.params.items() if n.endswith("_norm.weight")]
    assert not any(np.array_equal(a, b) for a, b in itertools.combinations(norms, 2))


def test_layers_of_another_width_are_refused_and_leave_nothing(text: Path) -> None:
    narrow = replace(MODELS["tied"], dim=24)
    with pytest.raises(WeftError, match="layers have the widths 24 and 32"):
        distil(narrow, original("tied"), text, layers=0.5)
    assert not (text.parent / "run").exists()
    distil(narrow, original("tied"), text, layers=0.0)


@pytest.mark.long
def test_an_architecture_with_linear_attention_begins_with_the_weights_that_it_shares(text: Path) -> None:
    first = original("tied")
    block = weft.Block(weft.LinearAttention(4), weft.GatedMLP(48), weft.RMSNorm())
    student = weft.Decoder(VOCAB, 32, 2, block, context=64, tie_embeddings=True)
    drawn = student.graph()
    begun = inherit_weights(drawn, first)
    for name, param in begun.params.items():
        source = drawn if name.endswith(("attn.k.weight", "attn.v.weight")) else first  # which have more heads now
        recipe = source.params[name].recipe
        np.testing.assert_array_equal(param.recipe.evaluate(begun.reader), recipe.evaluate(source.reader))
    run, graph = distil(student, first, text, layers=0.5, tokens=9600)
    ids = np.load(run.folder / "held_out.npy")
    ids = ids[: len(ids) // CONTEXT * CONTEXT].reshape(-1, CONTEXT).astype(np.int64)
    assert run.before == pytest.approx(divergence(first, begun, ids), rel=1e-3)
    assert divergence(first, graph, ids) == pytest.approx(run.best, rel=1e-3)
    assert run.best < run.before


@pytest.mark.long
def test_only_scales_norms_and_biases_of_a_quantized_model_change(text: Path) -> None:
    for name in MODELS:
        first = original(name)
        quantized = run_passes(first, QUANTIZE)
        _, trained = distil(quantized, first, text, name)
        assert trained.params.keys() == quantized.params.keys()
        assert list(map(str, trained.nodes)) == list(map(str, quantized.nodes))
        vectors = {n for n, p in quantized.params.items() if (p.type.rank == 1 and "norm" in n) or n.endswith(".bias")}
        changed = set()
        for param, other in ((param, trained.params[key]) for key, param in quantized.params.items()):
            if not isinstance(param.recipe, BlockRecipe):
                before, after = param.recipe.evaluate(quantized.reader), other.recipe.evaluate(trained.reader)
                if not np.array_equal(before, after):
                    changed.add(param.name)
                continue
            layout = param.recipe.layout(quantized.reader)
            assert isinstance(other.recipe, BlockRecipe) and other.recipe.layout(trained.reader) == layout
            for part in ("packed", "points"):
                before, after = (
                    Stored(p.recipe, part).evaluate(g.reader) for p, g in ((param, quantized), (other, trained))
                )
                np.testing.assert_array_equal(before, after)
            before, after = (
                Stored(p.recipe, "steps").evaluate(g.reader) for p, g in ((param, quantized), (other, trained))
            )
            assert not np.array_equal(before, after)
            np.testing.assert_array_equal(after, after.astype(np.float16))
        assert changed == vectors


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, {"layers.0.attn", "layers.1.attn"}),
        (
            ("norms",),
            {"layers.0.attn_norm", "layers.0.ffn_norm", "layers.1.attn_norm", "layers.1.ffn_norm", "final_norm"},
        ),
        (("layers.1.ffn.*",), {"layers.1.ffn"}),
        (("embed.weight", "biases"), {"embed"}),
    ],
)
def test_groups_and_patterns_choose_parameters(words: tuple[str, ...] | None, expected: set[str]) -> None:
    first = original("tied")
    graph = run_passes(first, "mha-to-gqa{kv_heads=1}")
    choice = choose_parameters(graph, first, words)
    assert {".".join(name.split(".")[:3]).removesuffix(".weight") for name in choice.direct} == expected
    assert not choice.scales and not choice.low_rank


def test_choices_for_quantized_and_unchanged_models() -> None:
    first = original("tied")
    assert choose_parameters(first, first).direct == {n for n, p in first.params.items() if not p.recipe.is_constant}
    windowed = run_passes(first, 'sliding-window{size=4, layers="1"}')
    assert choose_parameters(windowed, first).direct == {name for name in first.params if "layers.1.attn." in name}
    lora = choose_parameters(first, first, ("lora", "norms"))
    assert "layers.0.attn.q.weight" in lora.low_rank and lora.direct == {n for n in first.params if "norm" in n}
    quantized = choose_parameters(run_passes(first, QUANTIZE), first)
    assert quantized.scales and quantized.direct == lora.direct
    with pytest.raises(
        WeftError, match=r"--train layers\.9\.\*: no parameter has such a name; groups are scales, norms"
    ):
        choose_parameters(first, first, ("layers.9.*",))


@pytest.mark.parametrize("target", others_long(["ort-cpu", "onnx", "torch"]))
def test_the_result_compiles_to_the_same_values(
    target: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "SessionOptions", ExactOptions)
    name = {"ort-cpu": "tied", "onnx": "mixture", "torch": "biased"}[target]
    first = original(name)
    model = rewrite(Model(first, name, name), QUANTIZE)
    run = weft.distil(model, tmp_path / "run", replace(SETTINGS, steps=20, tokens=None), against=first, text=text)
    trained = weft.load_source(run.folder)
    assert trained.provenance["pipeline"].endswith("; distil")
    ids = np.random.default_rng(1).integers(0, VOCAB, 20)
    exact = log_probabilities(trained.graph, ids[None])[0]
    options = {"arithmetic": "f32"} if target == "ort-cpu" else {}
    weft.compile(trained, tmp_path / "out", target=target, **options)
    logits = weft.load(tmp_path / "out", trust=target == "torch").logits(ids.tolist())[-1].astype(np.float64)
    found = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(found, exact[-1], rtol=0, atol=5e-5 * np.abs(exact).max())


@pytest.mark.long
def test_tied_tables_stay_tied(text: Path) -> None:
    first = original("tied")
    for pipeline in (QUANTIZE, "mha-to-gqa{kv_heads=1}"):
        _, trained = distil(
            run_passes(first, pipeline), first, text, pipeline[:5], train=("all", "scales"), steps=20, tokens=None
        )
        embedding = next(node for node in trained.nodes if node.op.name == "embedding")
        assert len(embedding.inputs[1].users) == 2
        assert {name for name in weft.torch(trained).state_dict() if "head" in name} == set()


class Stop(Exception):
    pass


def stop_at(number: int) -> Callable[[RunState], None]:
    def report(state: RunState) -> None:
        if state.number == number:
            raise Stop

    return report


@pytest.mark.parametrize("stop", others_long([9, 4]))  # in either phase
def test_an_interrupted_run_continues_bit_by_bit(stop: int, text: Path) -> None:
    first = original("tied")
    quantized = run_passes(first, QUANTIZE)
    settings = replace(SETTINGS, layers=0.5, tokens=None, steps=12, validate_every=3, top=8, labels=0.1)
    options: dict[str, Any] = {"against": first, "text": text}
    whole = weft.distil(quantized, text.parent / "whole", settings, **options)
    with pytest.raises(Stop):
        weft.distil(quantized, text.parent / "parts", settings, **options, report=stop_at(stop))
    parts = weft.distil(quantized, text.parent / "parts", settings, **options, resumes=True)
    assert replace(parts, folder=whole.folder) == whole
    one, two = (torch.load(run.folder / "checkpoint.pt", weights_only=True)["model"] for run in (whole, parts))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_gradients_equal_a_plain_loop(text: Path) -> None:
    first = original("tied")
    rewritten = run_passes(first, "mha-to-gqa{kv_heads=1}")
    losses, norms = [], []
    weft.distil(
        rewritten,
        text.parent / "run",
        replace(SETTINGS, tokens=None, steps=3, train=("all",), rate=0.02, schedule="constant", warmup=0),
        against=first,
        text=text,
        report=lambda state: (losses.append(state.step.losses["loss"]), norms.append(state.step.gradient)),
    )
    teacher, student = torch_module(first), torch_module(rewritten)
    sizes = {p: float(p.detach().square().mean().sqrt()) * (1 if p.ndim > 1 else 0.1) for p in student.parameters()}
    groups = [{"params": [p], "lr": 0.02 * size} for p, size in sizes.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    data = Windows(np.load(text.parent / "run" / "tokens.npy"), CONTEXT, CONTEXT)
    for n in range(3):
        ids = data.draw(8 * n, 8).windows
        with torch.no_grad():
            wanted = teacher(ids).log_softmax(-1)
        loss = F.kl_div(student(ids).log_softmax(-1), wanted, log_target=True, reduction="sum") / ids.numel()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        assert losses[n] == pytest.approx(float(loss.detach()), rel=1e-4)
        assert norms[n] == pytest.approx(float(norm), rel=1e-3)


@pytest.mark.parametrize("pipeline", others_long(["mha-to-gqa{kv_heads=1}", QUANTIZE]))
def test_an_encoder_comes_closer_in_its_outputs(pipeline: str, text: Path) -> None:
    block = weft.Block(weft.Attention(4, causal=False), weft.GatedMLP(48), weft.LayerNorm())
    first = in_memory(weft.Encoder(VOCAB, 32, 2, block, context=64, pooler=True).graph())
    rewritten = run_passes(first, pipeline)
    run, trained = distil(rewritten, first, text, layers=0.5, rate=0.02, top=64)
    ids = np.load(run.folder / "held_out.npy")[: 2 * CONTEXT].reshape(-1, CONTEXT)
    inputs = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(CONTEXT)[None].repeat(2, 0),
    }

    def compute(graph: Graph) -> dict[str, np.ndarray]:
        return interpret(graph, {k: v for k, v in inputs.items() if k in graph.inputs})

    wanted = compute(first)
    for graph, error in ((rewritten, run.before), (trained, run.best)):
        errors = [
            ((compute(graph)[k] - v) ** 2).reshape(2, -1).sum(1) / (v**2).reshape(2, -1).sum(1)
            for k, v in wanted.items()
        ]
        assert error == pytest.approx(np.mean(errors), rel=5e-3)
    assert (
        run.best < 0.9 * run.before and run.measure == "error of the outputs on held-out text, relative to their size"
    )
    with pytest.raises(WeftError, match=r"labels, hidden and top are for decoders: .* is an encoder"):
        distil(rewritten, first, text, "more", labels=1.0, top=64)


def test_without_improvement_no_model_is_written(text: Path) -> None:
    first = original("tied")
    with pytest.raises(WeftError, match=r"no closer to .* on held-out text"):
        distil(run_passes(first, QUANTIZE), first, text, rate=100.0)
    assert not (text.parent / "run" / "best").exists()


def test_equal_settings_give_equal_runs(text: Path) -> None:
    """With the start of matrices of low rank, and more stored tokens than the model has."""
    first = original("tied")
    merged = run_passes(first, "mha-to-gqa{kv_heads=1}")
    runs = [
        distil(merged, first, text, name, tokens=None, steps=3, train=("lora",), layers=0.2, top=64)[0]
        for name in ("one", "two")
    ]
    logs = [[line.split(",")[4:8] for line in (run.folder / "log.csv").read_text().splitlines()] for run in runs]
    assert logs[0] == logs[1] and len(logs[0]) == 4 and runs[0].steps == 3


def test_another_run_is_not_continued(text: Path) -> None:
    first = original("tied")
    merged = run_passes(first, "mha-to-gqa{kv_heads=1}")
    run, _ = distil(merged, first, text, tokens=None, steps=2)
    np.save(text.with_name("other.npy"), np.load(text)[::-1])

    def refuse(message: str, text: Any = (), **settings: Any) -> None:
        chosen = replace(SETTINGS, **{"tokens": None, "steps": 4} | settings)
        with pytest.raises(WeftError, match=message):
            weft.distil(merged, run.folder, chosen, against=first, text=text, device="cpu", resumes=True)

    refuse(r"run\.json has batch 8, and this command 4: give the same to continue", batch=4)
    refuse("has labels 0.0, and this command 1.0", labels=1.0)
    refuse("has texts", text=text.with_name("other.npy"))
    chosen = replace(SETTINGS, tokens=None, steps=4)
    assert weft.distil(merged, run.folder, chosen, against=first, text=text, device="cpu", resumes=True).steps == 4


def test_unsuitable_pairs_are_refused(text: Path) -> None:
    first, other = original("tied"), in_memory(replace(MODELS["tied"], vocab=54).graph())
    quantized = run_passes(first, QUANTIZE)

    def refuse(message: str, model: Any = quantized, against: Any = first, **settings: Any) -> None:
        with pytest.raises(WeftError, match=message):
            weft.distil(model, text.parent / "out", replace(SETTINGS, **settings), against=against, text=text)
        assert not (text.parent / "out").exists()

    refuse(r"returns logits \[53\], --against .* logits \[54\]: they differ", against=other)
    refuse("has caches", model=run_passes(first, f"{QUANTIZE}, kv-cache"))
    with pytest.raises(WeftError, match="rank is 0"):
        DistilSettings(rank=0)
    with pytest.raises(WeftError, match="layers is 1, but it is a share of the run"):
        DistilSettings(layers=1)
    with pytest.raises(WeftError, match="is not the folder of a run"):
        weft.distil(quantized, text.parent / "none", SETTINGS, against=first, text=text, resumes=True)


def test_without_a_rate_a_model_near_its_original_takes_small_steps(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = original("tied")
    monkeypatch.setattr(sys.modules[choose_parameters.__module__], "FAR", far := 10.0)
    run, _ = distil(run_passes(first, "mha-to-gqa{kv_heads=1}"), first, text, rate=None, steps=20, tokens=None)
    rates = [row["rate"] for row in RunFolder(run.folder).read_log()]
    assert run.before < far and max(rates) == pytest.approx(RATE * run.before / far, rel=0.1)
