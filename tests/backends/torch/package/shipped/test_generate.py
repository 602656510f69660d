"""Scripts in a folder of PyTorch: they generate and embed without weft, and reject bad input clearly."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from weft.backends.runtime.core.generation import Generator
from weft.backends.torch.package.shipped.load import DTYPES
from weft.ir import interpret

from .....passes.zoo import ZOO
from .....sampling import each
from ...generated import assert_close, tolerance
from .conftest import Script
from .scripts import compiled, ids_of


@pytest.mark.parametrize("name", ["variant/grouped", "variant/hybrid", "variant/encoder-decoder", "preset/gpt2"])
def test_generates_the_tokens_of_the_runtime(name: str, script: Script, tmp_path: Path) -> None:
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
def test_quantized_weights_are_packed(weights: str, dtype: torch.dtype, script: Script, tmp_path: Path) -> None:
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


def test_stops_at_the_longest_length_and_at_stop_tokens(decoder: Path, broken: Path, script: Script) -> None:
    every = ids_of(script(decoder / "generate.py", "--ids", "3,4", "--max-tokens", 99)[1])
    assert len(every) == 19 + 1 - 2
    facts = json.loads((broken / "weft.json").read_text())
    (broken / "weft.json").write_text(json.dumps({**facts, "eos_token_ids": [every[5]]}))
    stopped = ids_of(script(broken / "generate.py", "--ids", "3,4", "--max-tokens", 99)[1])
    assert stopped == every[: every.index(every[5])]


@pytest.mark.long
def test_script_runs_without_weft(decoder: Path, tmp_path: Path) -> None:
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


def test_closed_pipe_ends_without_traceback(decoder: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the status of a shell for a closed pipe, as after ``| head``."""
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
def test_bad_arguments_are_rejected_in_one_sentence(args: list[str], words: str, decoder: Path, script: Script) -> None:
    status, out, err = script(decoder / "generate.py", *args)
    assert (status, out) == (2, "")
    assert words in err.splitlines()[-1]
