"""Precisions of target web, and the options that select them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import weft
from weft import WeftError

from ...e2e.families import ROWS


@pytest.mark.parametrize(
    ("options", "file"),
    [
        ({}, "model_q4"),
        ({"weights": "int8"}, "model_quantized"),
        ({"weights": "int4{method=rtn}", "dtype": "f16"}, "model_q4f16"),
        ({"dtype": "float16"}, "model_fp16"),
        ({"precisions": "fp32,fp32"}, "model"),
    ],
)
def test_options_name_the_file(options: dict[str, Any], file: str, tmp_path: Path) -> None:
    ROWS["llama-gqa-tied"].save(tmp_path / "hf")
    weft.compile(tmp_path / "hf", tmp_path / "out", target="web", **options)
    assert [path.stem for path in (tmp_path / "out/onnx").glob("*.onnx")] == [file]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precisions": "q5"}, "--precisions 'q5' is unknown: choose of fp32, fp16, q8"),
        ({"precisions": "q4", "weights": "int4"}, "--precisions states dtype and weights"),
        ({"weights": "int3"}, "transformers.js has no name for f32 int3; it has f32, f16, f32 int8"),
        ({"dtype": "f16", "weights": "int8"}, "transformers.js has no name for f16 int8"),
        ({"passes": "default, -kv-cache, -last-token-logits"}, "libraries generate only with caches: leave kv-cache"),
        ({"javascript": "nowhere"}, "nowhere has no @huggingface/transformers: run `npm install"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    ROWS["llama-gqa-tied"].save(tmp_path / "hf")
    with pytest.raises(WeftError, match=message):
        weft.compile(tmp_path / "hf", tmp_path / "out", target="web", **options)
    assert not (tmp_path / "out").exists()
