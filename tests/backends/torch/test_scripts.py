"""Scripts in a folder of PyTorch: they generate and embed without weft, and reject bad input clearly."""

from __future__ import annotations

import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.ort.ort_encoder import EncoderModel as Runner
from weft.backends.torch.package.shipped.load import DTYPES
from weft.ir import Graph, interpret

from ...frontends.command import refused
from ...passes.zoo import ZOO
from ...sampling import each
from .generated import assert_close, tolerance

NAMES = ("model", "load", "sampling", "decode", "kernels")
Script = Callable[..., tuple[int, str, str]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Script]:
    """Runs a script of a folder in this process, where weft cannot be imported: its status, stdout, and stderr."""

    def run(path: Path, *args: str | Path) -> tuple[int, str, str]:
        for name in [n for n in sys.modules if n.partition(".")[0] in NAMES]:
            del sys.modules[name]
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "weft", None)
            patch.setattr(sys, "argv", [str(path), *map(str, args)])
            patch.setattr(sys, "path", [str(path.parent), *sys.path])
            try:
                runpy.run_path(str(path), run_name="__main__")
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
        return status, *capsys.readouterr()

    yield run
    for name in [n for n in sys.modules if n.partition(".")[0] in NAMES]:
        del sys.modules[name]


def compiled(graph: Graph, out: Path, **options: Any) -> Path:
    weft.compile(graph, out, target="torch", max_length=19, **options)
    return out


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(ZOO["variant/grouped"](), tmp_path_factory.mktemp("scripts") / "decoder")


@pytest.fixture
def broken(decoder: Path, tmp_path: Path) -> Path:
    """A copy of the decoder to be changed."""
    return Path(shutil.copytree(decoder, tmp_path / "broken"))


def ids_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@pytest.mark.parametrize("name", ["variant/grouped", "variant/hybrid", "variant/encoder-decoder", "preset/gpt2"])
def test_generates_as_the_runtime_does(name: str, script: Script, tmp_path: Path) -> None:
    folder = compiled(ZOO[name](), tmp_path / "out")
    model = weft.load(folder, device="cpu", trust=True)
    assert isinstance(model, Generator)
    (wanted,) = model.generate([[3, 4, 5, 6]], max_tokens=12)
    status, out, err = script(folder / "generate.py", "--ids", "3,4,5,6", "--max-tokens", 12)
    assert (status, ids_of(out)) == (0, wanted.tokens)
    assert err.startswith("4 tokens read and 12 written in ")


@pytest.mark.parametrize(
    ("weights", "dtype"),
    each(2, itertools.product(("bits=4", "bits=8, group=64"), (torch.float32, torch.bfloat16, torch.float16))),
    ids=str,
)
def test_packs_quantized_weights(weights: str, dtype: torch.dtype, script: Script, tmp_path: Path) -> None:
    """Without weft, and with the logits of the dequantized weights."""
    block = weft.Block(weft.Attention(heads=2, kv_heads=1, rope=weft.RoPE(1e4)), weft.GatedMLP(96), norm=weft.RMSNorm())
    graph = weft.Decoder(vocab=97, dim=64, layers=[block] * 2, tie_embeddings=True).graph()
    graph = weft.run_passes(graph, f"quantize{{{weights}, method=rtn}}")
    name = next(name for name, known in DTYPES.items() if known == dtype)
    folder = compiled(graph, tmp_path / "out", dtype=name)
    assert json.loads((folder / "weft.json").read_text())["blocks"]
    model = weft.load(folder, device="cpu", trust=True)
    assert isinstance(model, Generator)
    ids = np.random.default_rng(0).integers(0, 97, (1, 7))
    want = interpret(graph, {"input_ids": ids, "position_ids": np.arange(7)[None]})["logits"]
    assert_close(torch.from_numpy(model.logits(ids[0].tolist())), want[0], tolerance(graph, dtype))
    (wanted,) = model.generate([[3, 4, 5, 6]], max_tokens=12)
    status, out, _ = script(folder / "generate.py", "--ids", "3,4,5,6", "--max-tokens", 12)
    assert (status, ids_of(out)) == (0, wanted.tokens)
    assert sys.modules["kernels.cpu.packed"].refusal.cache_info().hits > 12  # it was asked for every product


def test_draws_the_same_by_the_same_seed(decoder: Path, script: Script) -> None:
    options = ("--ids", "3,4", "--max-tokens", 15, "--top-k", 12, "--top-p", 0.9)
    runs = [script(decoder / "generate.py", *options, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_ends_at_the_longest_text_and_at_stop_tokens(decoder: Path, broken: Path, script: Script) -> None:
    every = ids_of(script(decoder / "generate.py", "--ids", "3,4", "--max-tokens", 99)[1])
    assert len(every) == 19 + 1 - 2
    facts = json.loads((broken / "weft.json").read_text())
    (broken / "weft.json").write_text(json.dumps({**facts, "eos_token_ids": [every[5]]}))
    stopped = ids_of(script(broken / "generate.py", "--ids", "3,4", "--max-tokens", 99)[1])
    assert stopped == every[: every.index(every[5])]


def test_embeds_as_the_runtime_does(script: Script, tmp_path: Path) -> None:
    folder = compiled(ZOO["preset/bert-base"](), tmp_path / "out")
    model = weft.load(folder, device="cpu", trust=True)
    assert isinstance(model, Runner)
    for pooling in ("mean", "cls", "max"):
        status, out, _ = script(folder / "embed.py", "--ids", "3,4,5", "--ids", "7,8", "--pooling", pooling)
        vectors = [json.loads(line) for line in out.splitlines()]
        eps = np.finfo(np.float32).eps * 36**0.5
        for vector, ids in zip(vectors, ([3, 4, 5], [7, 8]), strict=True):
            np.testing.assert_allclose(vector, model.encode([ids], pooling=pooling)[0], atol=16 * eps)
        assert status == 0 and len(vectors) == 2
    assert "give texts, or --ids" in script(folder / "embed.py")[2]


def test_runs_where_weft_is_not_installed(decoder: Path, tmp_path: Path) -> None:
    """In a process of its own, from a copy of the folder."""
    copy = shutil.copytree(decoder, tmp_path / "copy")
    alone = "import runpy, sys; sys.modules['weft'] = None; sys.argv = sys.argv[1:]; sys.path[0] = sys.argv[1]"
    alone = f"{alone}; del sys.argv[1]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-W", "error", "-E", "-s", "-c", alone, copy / "generate.py", copy, "--ids", "3,4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model = weft.load(decoder, device="cpu", trust=True)
    assert isinstance(model, Generator)
    assert ids_of(done.stdout) == model.generate([[3, 4]])[0].tokens


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {key: t.clone() for key, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def told(folder: Path, **of: Any) -> None:
    """Let the file of weights tell these things of the embedding."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["embed.weight"] |= of
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


def shards(folder: Path, count: int) -> None:
    """Leave the first of several files that hold the weights."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = sorted(tensors)[: len(tensors) // count]
    save_file({key: tensors[key] for key in keys}, folder / f"model-00001-of-{count:05}.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda f: changed(f, lambda t: t.pop("embed.weight")), "the weights lack embed.weight (1 of "),
    "unknown": (lambda f: changed(f, lambda t: t.update(more=torch.ones(1))), "have more, which is not in the model"),
    "shape": (
        lambda f: changed(f, lambda t: t.update({"embed.weight": torch.ones(2, 3)})),
        "embed.weight is [2, 3] in the weights, but [37, 30] in the model",
    ),
    "cut": (lambda f: cut(f / "model.safetensors"), "model.safetensors: not a complete safetensors file: "),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors in it"),
    "whole numbers": (
        lambda f: changed(f, lambda t: t.update({"embed.weight": t["embed.weight"].int()})),
        "embed.weight is torch.int32 in the weights, but torch.float32 in the model",
    ),
    "a shard": (lambda f: shards(f, 2), "the weights lack "),
    "below 0": (lambda f: told(f, shape=[-37, -30]), "do not hold "),
    "before the file": (lambda f: told(f, data_offsets=[-9999, 37 * 30 * 4 - 9999]), "do not hold "),
    "another size": (lambda f: told(f, shape=[37, 29]), "do not hold "),
    "a shift": (lambda f: told(f, data_offsets=[4, 37 * 30 * 4 + 4]), "where the last one ends"),
    "another dtype": (lambda f: told(f, dtype="F8"), "not a complete safetensors file: 'F8'"),
    "code": (lambda f: shutil.rmtree(f / "kernels"), "is incomplete: No module named 'kernels'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_weights_that_do_not_fit_are_one_sentence(what: str, broken: Path, script: Script) -> None:
    spoil, words = BROKEN[what]
    spoil(broken)
    status, out, err = script(broken / "generate.py", "--ids", "3,4")
    assert (status, out) == (2, "")
    assert err.startswith("generate.py: ") and words in err and err.count("\n") == 1
    assert words in refused("run", broken, "--trust", "--ids", "3,4")


MANIFESTS = [
    "",
    "[]",
    "{}",
    '{"kind": "decoder", "vocab": 37}',
    '{"kind": 1, "vocab": 37, "max_length": 9}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_manifest_that_is_none_is_one_sentence(text: str, broken: Path, script: Script) -> None:
    (broken / "weft.json").write_text(text)
    status, out, err = script(broken / "generate.py", "--ids", "3,4")
    assert (status, out) == (2, "")
    assert "weft.json cannot be read: " in err and err.count("\n") == 1


def test_an_old_pytorch_is_named(decoder: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    status, _, err = script(decoder / "generate.py", "--ids", "3")
    assert (status, err) == (2, "generate.py: PyTorch 2.10.1 is too old: install 2.11 or newer\n")


def test_nobody_reads_on(decoder: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind ``| head``: no traceback, and the status that a shell gives."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        status, _, err = script(decoder / "generate.py", "--ids", "3,4", "--max-tokens", 5)
    assert (status, err) == (141, "")


REFUSED = [
    (["--ids", "3,37"], "it must be tokens from 0 to 36"),
    (["--ids", ",".join("3" * 20)], "the prompt of 20 tokens is longer than the 19 that the model was compiled for"),
    (["words"], "has no tokenizer.json: give token ids instead, as in --ids 1,15,7"),
    (["--ids", "3", "--device", "xpu"], "device xpu cannot be used: Torch not compiled with XPU enabled"),
    (["--ids", "3", "--device", "tpu"], "device 'tpu' is unknown to PyTorch: use cpu or cuda"),
    ([], "give a prompt, or --ids"),
    (["words", "--ids", "3"], "give a prompt, or --ids"),
    (["--ids", "3;4"], "argument --ids: '3;4' is not a list of token ids such as 1,15,7"),
    (["--ids", "3", "--top-p", "1.5"], "--top-p above 0 and at most 1"),
    (["--ids", "3", "--temperature", "nan"], "--temperature at least 0"),
    (["--ids", "3", "--max-tokens", "0"], "--max-tokens is at least 1"),
]


@pytest.mark.parametrize(("args", "words"), REFUSED)
def test_bad_arguments_are_one_sentence(args: list[str], words: str, decoder: Path, script: Script) -> None:
    status, out, err = script(decoder / "generate.py", *args)
    assert (status, out) == (2, "")
    assert words in err.splitlines()[-1]


def test_a_gpu_that_is_not_there_is_named(decoder: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "device cuda cannot be used: PyTorch"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # nor one that is there
    status, _, err = script(decoder / "generate.py", "--ids", "3", "--device", "cuda")
    assert status == 2 and words in err
    assert words in refused("run", decoder, "--trust", "--ids", "3", "--device", "cuda")
