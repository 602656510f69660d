"""The errors that the table tests measure, kept for docs/supported.md; SmolLM2 as transformers computes it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weft.frontends.models.families import FAMILIES

from ..supported import ERRORS, GENAI, Errors, read_errors, read_genai

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="module")
def errors() -> Iterator[Errors]:
    """Measurements of the tests: family, target, way of running -> the largest error of its rows.

    With ``WEFT_FAMILIES=write`` they replace those of the same families in the committed file.
    """
    measured: Errors = {}
    yield measured
    if os.environ.get("WEFT_FAMILIES") == "write":
        assert "PYTEST_XDIST_WORKER" not in os.environ, "the errors are collected in one process: -n 0"
        known = {**read_errors(), **measured}
        write_errors({family: known[family] for family in FAMILIES if family in known})


@pytest.fixture(scope="module")
def genai() -> Iterator[dict[str, bool]]:
    """Families, and whether their folders have a configuration of onnxruntime-genai; kept as `errors` are."""
    found: dict[str, bool] = {}
    yield found
    if os.environ.get("WEFT_FAMILIES") == "write":
        write_genai((read_genai() - found.keys()) | {family for family, has in found.items() if has})


@pytest.fixture(scope="session")
def hf_model(smollm2_gguf: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """SmolLM2 by transformers, its weights dequantized from the GGUF."""
    import torch
    from transformers import LlamaForCausalLM

    sys.path.insert(0, str(root / "benchmarks"))
    from smollm2 import hugging_face_folder

    folder = hugging_face_folder(smollm2_gguf, tmp_path_factory.mktemp("hf"), tokenizer=False)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def write_errors(errors: Errors) -> None:
    """Write `errors` as the committed errors, two digits, a line per family."""
    lines = []
    for family, targets in sorted(errors.items()):
        short = {target: {way: float(f"{e:.1e}") for way, e in ways.items()} for target, ways in targets.items()}
        lines.append(f"{json.dumps(family)}: {json.dumps(short)}")
    ERRORS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def write_genai(families: Collection[str]) -> None:
    """Write `families`, the result of the next `read_genai`."""
    GENAI.write_text(json.dumps(sorted(families), indent=1) + "\n", encoding="utf-8")
