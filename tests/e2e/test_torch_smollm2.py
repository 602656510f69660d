"""SmolLM2 as a folder of PyTorch: it reads in one sitting, needs nothing of weft, and is the model that it was."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from weft.backends.runtime.core.generation import Generator

from .test_smollm2 import NEW, hf_greedy, hf_logits

PROMPT = "The three laws of motion, explained to a child: "


@pytest.fixture(scope="module")
def folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "torch"
    weft.compile(smollm2_gguf, out, target="torch", max_length=1024)
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> Generator:
    loaded = weft.load(folder, device="cpu", trust=True)
    assert isinstance(loaded, Generator)
    return loaded


@pytest.fixture(scope="module")
def answer(model: Generator) -> list[int]:
    """Its greedy tokens after the prompt, whatever they are."""
    unstopped = Generator(model.decoder, folder=model.folder)
    tokens: list[int] = unstopped.generate(model.tokenizer.encode(PROMPT), max_tokens=NEW, chunk=7)[0].tokens
    return tokens


def test_model_file_is_short_and_imports_only_torch(folder: Path) -> None:
    text = (folder / "model.py").read_text()
    assert len(text.splitlines()) <= 200
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert {name.partition(".")[0] for name in imported} - sys.stdlib_module_names == {"torch"}


@pytest.mark.long
def test_generate_script_equals_transformers_without_weft(
    folder: Path,
    model: Generator,
    hf_model: torch.nn.Module,
    tmp_path: Path,
) -> None:
    ids = model.tokenizer.encode(PROMPT)
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    for script in ("generate.py", "load.py", "sampling.py"):  # those that look beside them
        (copy / script).unlink()
        (copy / script).write_bytes((folder / script).read_bytes())
    alone = "import runpy, sys; sys.modules['weft'] = None; del sys.argv[0]; sys.path[0] = sys.argv.pop(0); "
    alone += "runpy.run_path(sys.argv[0], run_name='__main__')"
    given = [copy / "generate.py", "--ids", ",".join(map(str, ids)), "--max-tokens", str(NEW)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-E", "-s", "-c", alone, copy, *map(str, given)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [int(part) for part in done.stdout.split(",")]
    assert found == hf_greedy(hf_model, ids, found)
    assert len(found) == NEW and not model.stop_ids.intersection(found)  # the text does not end before


def test_runtime_logits_and_tokens_equal_transformers(
    model: Generator,
    answer: list[int],
    hf_model: torch.nn.Module,
) -> None:
    ids = model.tokenizer.encode(PROMPT)
    wanted = hf_logits(hf_model, ids)
    assert np.abs(model.logits(ids) - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert answer == hf_greedy(hf_model, ids, answer)
    assert len(answer) == NEW


@pytest.mark.long
def test_kept_blocks_give_the_same_tokens(
    smollm2_gguf: Path, hf_model: torch.nn.Module, model: Generator, answer: list[int]
) -> None:
    """As they are stored, in a fifth of the bytes; one pass over the prompt and what transformers adds to it."""
    kept = weft.torch(smollm2_gguf, keep_blocks="all")
    weights = sum(p.numel() for p in hf_model.parameters())
    assert sum(t.nbytes for t in kept.state_dict().values()) < 0.81 * weights  # bytes, of 4 in f32
    prompt = model.tokenizer.encode(PROMPT)
    ids = prompt + answer
    assert answer == hf_greedy(hf_model, prompt, answer)
    wanted = hf_logits(hf_model, ids)
    with torch.inference_mode():
        got = kept(torch.tensor([ids]))[0].numpy()
    assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert got.argmax(-1)[len(prompt) - 1 : -1].tolist() == ids[len(prompt) :]


def test_chat_about_paris_is_answered(model: Generator) -> None:
    prompt = model.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    stream = model.stream(prompt, max_tokens=30)
    assert "Paris" in "".join(stream)
    assert stream.result.finish == "stop"
