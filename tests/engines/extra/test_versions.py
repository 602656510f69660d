"""Each version of transformers that folders are made for generates the tokens of weft's runtime, with all caches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import weft

from ..compiled import compiled

ROOT = Path(__file__).resolve().parents[3]
INSTALLED = metadata.version("transformers")
LISTED = re.findall(r"^transformers==(\S+)", (ROOT / "requirements/transformers.txt").read_text("utf-8"), re.MULTILINE)
KINDS = {  # of caches, and graphs that need them
    "growing": "preset/smollm2-135m",
    "learned positions": "preset/gpt2",
    "window": "preset/mistral-7b",
    "experts": "preset/mixtral-8x7b",
    "latent": "preset/deepseek-v3",
    "states": "preset/mamba-130m",
    "states of linear attention": "variant/linear attention, rope",
    "states and keys": "variant/hybrid",
    "encoder-decoder": "family/t5-v1.1",
}
BATCHED = {"growing", "learned positions", "window", "experts", "latent", "real weights"}
PROMPT = "Once upon a time, there was a"


@pytest.fixture(scope="module")
def jobs(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Write a folder of each kind; return what to generate, and the tokens of weft's runtime."""
    out, asked, wanted = tmp_path_factory.mktemp("kinds"), dict[str, Any](), dict[str, list[int]]()
    folders = {kind: compiled(name, out / kind) for kind, name in KINDS.items()} | {"real weights": smollm2}
    for kind, folder in folders.items():
        weft.compile(folder, out / f"{kind} onnx")
        model = weft.load(out / f"{kind} onnx")
        prompt = model.tokenizer.encode(PROMPT) if folder == smollm2 else [1, 2, 3, 4, 5]
        wanted[kind] = model.generate(prompt, max_tokens=64, temperature=0)[0].tokens
        new = len(wanted[kind])
        asked[kind] = {"folder": str(folder), "prompt": prompt, "new": new, "batched": kind in BATCHED}
    return asked, wanted


@pytest.mark.parametrize("version", sorted({*LISTED, INSTALLED}))
def test_every_transformers_version_generates_the_same_tokens(
    version: str, jobs: tuple[dict[str, Any], dict[str, list[int]]], tmp_path: Path
) -> None:
    asked, wanted = jobs
    unpacked = ROOT / "build/transformers" / version
    path = [] if version == INSTALLED else [str(unpacked)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, str(Path(__file__).with_name("greedy.py"))]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["version"] == version, f"`make test-engines` unpacks version {version} into {unpacked}"
    assert len(wanted["real weights"]) == 64
    for kind, ways in made["tokens"].items():
        assert ways == dict.fromkeys(ways, wanted[kind]), kind
