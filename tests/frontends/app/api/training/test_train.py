"""weft.train: runs of every kind of layer, their folders as sources, and runs that were interrupted."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import weft
from weft import TrainingSettings
from weft.backends.torch.training.batches import Windows
from weft.backends.torch.training.objectives import MaskedTokens
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.app.api.training import runs
from weft.frontends.app.api.training.run_folder import RunState
from weft.frontends.formats.weft.model_folder import write_model
from weft.ir.errors import WeftError

from .....sampling import ALL, others_long

STEPS = 300 if ALL else 12
SETTINGS = TrainingSettings(steps=STEPS, batch=4, context=32, accumulate=2, validate_every=STEPS // 2)
MODELS = """
from weft import *

experts = Decoder(
    vocab=64, dim=32, layers=2, context=64,
    block=Block(
        Attention(heads=4, kv_heads=2, rope=RoPE(1e4)), MoE(4, 48, 2, router=Router(aux_loss=0.01)), norm=RMSNorm(),
        dropout=0.1,
    ),
)
corrected = Decoder(
    vocab=257, dim=32, layers=1, context=64,
    block=Block(Attention(heads=4), MoE(4, 48, 2, router=Router(scoring="sigmoid", correction=True)), norm=RMSNorm()),
)
states = Decoder(
    vocab=257, dim=32, context=64,
    layers=[Block(Mamba(64, state=8), None, RMSNorm()), Block(Attention(heads=2), GatedMLP(64), RMSNorm())],
)
learned = Decoder(
    vocab=257, dim=32, layers=2, positions=LearnedPositions(64), tie_embeddings=True,
    block=Block(DifferentialAttention(heads=4), MLP(64, "relu2"), LayerNorm()),
)
block = Block(Attention(heads=4), MLP(64), RMSNorm())
ranked = Decoder(vocab=257, dim=32, context=64, layers=[block, MixtureOfDepths(block, 8, aux_loss=0.01)])
signed = Decoder(vocab=257, dim=32, context=64, layers=[block, MixtureOfDepths(block)])
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("models") / "models.py"
    file.write_text(MODELS)
    return file


@pytest.fixture(scope="module")
def book(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "book.txt"
    file.write_bytes((root / "examples/texts/kings.txt").read_bytes()[:50_000])
    return file


@pytest.fixture(scope="module")
def begun(models: Path, book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one step of the model `states`."""
    return weft.train(
        f"{models}:states", book, tmp_path_factory.mktemp("begun") / "run", replace(SETTINGS, steps=1)
    ).folder


def rows(folder: Path) -> list[dict[str, str]]:
    """The log, without times."""
    with (folder / "log.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if "second" not in k} for row in csv.DictReader(file)]


class Stop(Exception):
    pass


def stop_at(number: int) -> Callable[[RunState], None]:
    def report(state: RunState) -> None:
        if state.number == number:
            raise Stop

    return report


@pytest.mark.parametrize("name", others_long(["experts", "states", "corrected", "learned", "ranked"], 2))
def test_an_interrupted_run_continues_bit_by_bit(name: str, models: Path, book: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more: dict[str, Any] = {"save_as": f"{models}:signed"} if name == "ranked" else {}
    spec = f"{models}:{name}"
    run = weft.train(spec, book, whole, SETTINGS, **more)
    with pytest.raises(Stop):
        weft.train(spec, book, parts, SETTINGS, **more, report=stop_at(STEPS // 2 + 1))
    assert weft.resume(parts, spec, **more) == replace(run, folder=parts)
    assert rows(parts) == rows(whole)
    one, two = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, parts))
    assert all(torch.equal(two["model"][key], value) for key, value in one["model"].items())
    losses = rows(whole)
    assert [row["step"] for row in losses] == [str(n + 1) for n in range(STEPS)]
    assert float(losses[-1]["loss"]) < float(losses[0]["loss"]) and run.best < run.before
    assert all((float(row["aux_loss"]) > 0) == (name in ("experts", "ranked")) for row in losses)
    assert [row["step"] for row in losses if row["validation"]] == [str(STEPS // 2), str(STEPS)]


def test_the_run_is_a_source_of_its_best_model(models: Path, book: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = weft.train(
        f"{models}:experts", book, out, replace(SETTINGS, rate=0.05, schedule="constant"), tokenizer="bpe:300"
    )
    assert (out / "loss.svg").read_text().startswith("<?xml")
    model = weft.load_source(out)
    assert model.description == "run run" and not model.random_init
    assert model.provenance["source"]["trained"]["settings"]["rate"] == 0.05
    score = weft.evaluate([], against=out, text=book, tokens=64, device="cpu").scores[0]
    assert score.nll is not None and score.nll < 6
    compiled = weft.compile(out, tmp_path / "compiled")
    assert compiled is not None and len(weft.load(tmp_path / "compiled").generate("And", max_tokens=4)[0].tokens) == 4
    weft.train(out, book, tmp_path / "further", replace(SETTINGS, steps=2))
    further = json.loads((tmp_path / "further" / "run.json").read_text())
    assert further["results"]["before"] == pytest.approx(run.best, rel=0.02)  # of fewer windows
    with pytest.raises(WeftError, match="exists: name another folder, or continue its run with --resume"):
        weft.train(out, book, tmp_path / "further", SETTINGS)
    shutil.rmtree(out / "best")
    with pytest.raises(WeftError, match="is a run without a model yet: continue it with --resume"):
        weft.load_source(out)


def test_a_held_out_text_and_ids_may_be_given(models: Path, book: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("abcd " * 100)
    settings = replace(SETTINGS, steps=2, accumulate=1)
    repeated = weft.train(f"{models}:states", book, tmp_path / "a", settings, validation=tmp_path / "other.txt")
    assert repeated.before == pytest.approx(
        weft.train(f"{models}:states", book, tmp_path / "b", settings).before, rel=0.1
    )
    (tmp_path / "ids.json").write_text(json.dumps(list(range(200)) * 3))
    assert weft.train(f"{models}:states", tmp_path / "ids.json", tmp_path / "c", settings).steps == 2
    assert not (tmp_path / "c" / "tokenizer").exists()


@pytest.mark.long
def test_a_killed_run_continues_from_its_last_checkpoint(
    models: Path, book: Path, warm: dict[str, str], tmp_path: Path
) -> None:
    settings = replace(SETTINGS, steps=40, validate_every=4)
    weft.train(f"{models}:learned", book, tmp_path / "whole", settings)
    command = [
        sys.executable,
        "-m",
        "weft",
        "train",
        f"{models}:learned",
        "--text",
        str(book),
        "-o",
        str(tmp_path / "parts"),
    ]
    options = ["--steps", "40", "--batch", "4", "--context", "32", "--accumulate", "2", "--validate-every", "4"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, env=os.environ | warm)
    checkpoint = tmp_path / "parts" / "checkpoint.pt"
    until = time.monotonic() + 60
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert torch.load(checkpoint, weights_only=True)["step"] % 4 == 0
    weft.resume(tmp_path / "parts", f"{models}:learned")
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


@pytest.mark.long
def test_two_processes_reach_the_losses_of_one(models: Path, book: Path, warm: dict[str, str], tmp_path: Path) -> None:
    """FSDP2 among two processes continues the run of one."""
    settings = TrainingSettings(steps=2, batch=4, context=32, validate_every=2, schedule="constant")
    spec = f"{models}:states"
    weft.train(spec, book, tmp_path / "half", settings)
    weft.train(spec, book, tmp_path / "whole", replace(settings, steps=4))
    launch = [str(shutil.which("torchrun", path=warm["PATH"])), "--standalone", "--nproc-per-node", "2", "-m", "weft"]
    command = [*launch, "train", spec, "--resume", str(tmp_path / "half"), "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=warm)
    assert done.returncode == 0, done.stderr
    two, one = rows(tmp_path / "half"), rows(tmp_path / "whole")
    assert [row["step"] for row in two] == ["1", "2", "3", "4"]
    for a, b in zip(one, two, strict=True):
        for key in ("loss", "gradient", "validation"):
            assert a[key] == b[key] or float(a[key]) == pytest.approx(float(b[key]), rel=1e-4)
    assert done.stdout.count("written; try") == 1
    assert (
        weft.load_source(tmp_path / "half").graph.params.keys()
        == weft.load_source(tmp_path / "whole").graph.params.keys()
    )


def test_settings_of_a_run_cannot_execute_code(models: Path, begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "run")
    evil = tmp_path / "evil.py"
    evil.write_text("raise SystemExit('it ran')")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    for key in ("source", "save_as"):
        (tmp_path / "run" / "run.json").write_text(json.dumps(record | {key: f"{evil}:model"}))
        with pytest.raises(WeftError, match=r"names code, .*evil\.py:model: to run it, name it yourself"):
            weft.resume(tmp_path / "run", None if key == "source" else f"{models}:states", steps=2)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "text": lambda data: b"nothing",
    "list": lambda data: b"[1]",
    "rows": lambda data: b"step,loss\nx,1\n",
}


@pytest.mark.parametrize(
    "file", ["checkpoint.pt", "run.json", "tokenizer/tokenizer.json", "log.csv", "tokens.npy", "held_out.npy"]
)
def test_a_damaged_run_is_refused_with_the_file(file: str, models: Path, begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "run")
    sound = (tmp_path / "run" / file).read_bytes()
    for name, damage in DAMAGE.items():
        if file == "log.csv" and name != "rows":
            continue  # rows may be missing
        (tmp_path / "run" / file).write_bytes(damage(sound))
        with pytest.raises(WeftError) as error:
            weft.resume(tmp_path / "run", f"{models}:states", steps=2)
        assert file.rpartition("/")[2] in str(error.value) or file.endswith(".npy"), (name, error.value)


def test_runs_that_cannot_continue_are_refused(models: Path, begun: Path, tmp_path: Path) -> None:
    spec = f"{models}:states"
    shutil.copytree(begun, run := tmp_path / "run")
    weft.resume(run, spec, steps=3)
    with pytest.raises(WeftError, match="run has 3 steps already: give a larger --steps"):
        weft.resume(run, spec, steps=2)
    (run / "checkpoint.pt").unlink()
    with pytest.raises(WeftError, match=r"checkpoint\.pt is missing: restore it, or begin a new run"):
        weft.resume(run, spec, steps=4)
    assert len(rows(run)) == 3


def test_a_run_whose_source_has_changed_is_refused(models: Path, begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, run := tmp_path / "run")
    weft.resume(run, f"{models}:states", steps=2, device="cpu")
    of_states = "Attention(heads=2), GatedMLP(64"
    (changed := tmp_path / "models.py").write_text(MODELS.replace(of_states, f'{of_states}, "gelu"'))
    with pytest.raises(WeftError, match="has changed: restore it, or begin a new run"):
        weft.resume(run, f"{changed}:states", steps=3, device="cpu")


@pytest.mark.long
def test_a_run_ends_with_a_validation_although_time_passes_between_steps(
    models: Path, book: Path, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, steps=None, minutes=0.01, validate_every=10**6)
    source, out = f"{models}:states", tmp_path / "run"
    run = weft.train(source, book, out, settings, device="cpu", report=lambda state: time.sleep(0.5))
    assert run.best == run.last != run.before and weft.load_source(run.folder)


def test_a_warm_up_may_last_for_the_run(models: Path, book: Path, tmp_path: Path) -> None:
    weft.train(f"{models}:states", book, tmp_path / "run", replace(SETTINGS, steps=2, warmup=2), device="cpu")
    with pytest.raises(WeftError, match="warmup is a number of steps, which minutes does not know"):
        TrainingSettings(minutes=1, warmup=2)


@pytest.mark.parametrize("options", ["bits=4, group=16, method=rtn", "bits=4, method=rtn", "format=mxfp4"])
def test_quantized_weights_that_train_as_floats_are_mentioned(
    options: str, models: Path, book: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(rewrite(weft.load_source(f"{models}:learned"), f"quantize{{{options}}}"), tmp_path / "q")
    weft.train(tmp_path / "q", book, tmp_path / "run", replace(SETTINGS, steps=1), tokenizer="bytes")
    assert "is quantized, and trains as floats: distil keeps its codes" in caplog.text


def test_untrainable_sources_are_refused(
    models: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "encoder.py").write_text(
        "from weft import *\nmodel = Encoder(300, 16, 1, Block(Attention(2, causal=False), MLP(16), RMSNorm()))"
    )

    def refuse(message: str, source: Any = f"{models}:states", text: Path = book, **settings: Any) -> None:
        with pytest.raises(WeftError, match=message):
            weft.train(source, text, tmp_path / "out", replace(SETTINGS, **settings))
        assert not (tmp_path / "out").exists() or "rate" in settings

    refuse("not enough for windows of 32", text=tmp_path / "short.txt")
    refuse("is an encoder without logits of tokens", source=tmp_path / "encoder.py")
    cached = weft.run_passes(weft.load_source(f"{models}:states").graph, "kv-cache")
    refuse("has caches", source=cached, text=book)
    refuse("which muP initializes differently", source=f"{models}:learned", init="mup")
    (tmp_path / "empty.txt").write_text("")
    refuse(r"empty\.txt has no text", text=tmp_path / "empty.txt")
    refuse("the loss is", rate=1e30, clip=1e30, steps=50)
    with pytest.raises(WeftError, match="the state_dict has"):
        weft.train(f"{models}:ranked", book, tmp_path / "saved", SETTINGS, save_as=f"{models}:experts")
    with pytest.raises(WeftError, match="has no linear weight that is a tensor of a checkpoint"):
        weft.train(f"{models}:states", book, tmp_path / "low", replace(SETTINGS, lora=4))
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(WeftError, match="--tensorboard needs the package tensorboard"):
        weft.train(f"{models}:states", book, tmp_path / "board", SETTINGS, tensorboard=True)
    assert not {"saved", "low", "board"} & {path.name for path in tmp_path.iterdir()}
    assert runs.HELD_OUT == 20


def test_encoders_train_on_masked_tokens_as_in_transformers(book: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    torch.manual_seed(0)
    bert = BertForMaskedLM(config)
    bert.save_pretrained(tmp_path / "bert")
    settings = replace(SETTINGS, steps=40, rate=5e-3, accumulate=1)
    run = weft.train(tmp_path / "bert", book, tmp_path / "run", settings, tokenizer="bytes")
    ids = np.load(tmp_path / "run" / "tokens.npy")
    windows = Windows(ids, 32, 32, shift=True).draw(0, 4).windows
    hidden, targets = MaskedTokens(1, 300).hide(windows)
    loss = bert(hidden, labels=torch.where(targets < 0, -100, targets)).loss
    assert float(rows(tmp_path / "run")[0]["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    assert run.best < run.before - 1
    weft.compile(tmp_path / "run", tmp_path / "onnx", target="ort-cpu")
    (likeliest,) = weft.load(tmp_path / "onnx").fill("And th[MASK] king")
    assert len(likeliest) == 5
