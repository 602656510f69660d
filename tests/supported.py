"""The page of supported families, from their tables and what tests measured. `python -m tests.supported` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from weft.frontends.models.families import FAMILIES
from weft.frontends.models.tables.family import tabulate_families
from weft.frontends.models.tables.other_types import MULTIMODAL, PAIRS, REFUSED

# family -> target -> way of running (full, chunked, decode) -> largest error, relative to the largest value
Errors = dict[str, dict[str, dict[str, float]]]
TARGETS = ("onnx", "ort-cpu", "torch")
ERRORS, GENAI = (Path(__file__).parent / "e2e" / name for name in ("errors.json", "genai.json"))
_PAGE = """# Supported families

Every family that weft reads from Hugging Face folders, by its `model_type`. `weft families` prints its first three
columns; tests measure the others ([families.md](families.md#a-new-family-step-by-step)).

| column | meaning |
|---|---|
| exported | the class for which `weft export` writes a matching graph; folders of other decoders keep their type |
| GGUF | the architecture of llama.cpp whose files are read; with `+` they are also exported |
| genai | folders for ONNX Runtime have a configuration of onnxruntime-genai |
| onnx, ort-cpu, torch | the largest error against transformers, relative to the largest value |

The errors are those of tiny models with every parameter random, run as one full pass, in chunks, and token by token.

Of multimodal models the language model is read, and towers for images or sound are left out: the pass
[take-embeddings](passes/take-embeddings.md) adds inputs for the embeddings of an image, and
[multimodal-rope](passes/multimodal-rope.md) for rows and columns (Qwen2-VL and its successors). Where such a model
lets the tokens of an image see each other (Gemma 3), ours sees only earlier ones. The types are {multimodal}.

Of a pair of encoders ({pairs}) the text encoder is read, and with `--as clip_vision_model` or
`--as siglip_vision_model` the image encoder ([run.md](run.md#encoders)).

A folder of another type is compared with all families; the error of `weft compile` names the most similar, and `--as`
reads it as one of them ([compile.md](compile.md)). [families.md](families.md) shows how to add one.

"""
_REFUSED = """
These types of transformers 5.23 are refused:

| type | reason |
| --- | --- |
"""


def read_errors() -> Errors:
    """Return the committed errors; families that were never measured are absent."""
    errors: Errors = json.loads(ERRORS.read_text(encoding="utf-8"))
    return errors


def read_genai() -> frozenset[str]:
    """Return the families whose compiled folders have a configuration of onnxruntime-genai."""
    return frozenset(json.loads(GENAI.read_text(encoding="utf-8")))


def page() -> str:
    """Return the table of the measured families and the refused types as a page of Markdown."""
    errors, genai = read_errors(), read_genai()
    head, *rows = tabulate_families({name: family for name, family in FAMILIES.items() if name in errors})
    lines = [(*head, "genai", *TARGETS), tuple("---" for _ in (*head, "genai", *TARGETS))]
    for name, *columns in rows:
        worst = (f"{max(errors[name][target].values()):.1e}" for target in TARGETS)
        lines.append((name, *columns, "yes" if name in genai else "", *worst))
    text = _PAGE.replace("{multimodal}", ", ".join(MULTIMODAL)).replace("{pairs}", ", ".join(PAIRS))
    return text + _rows(lines) + _REFUSED + _rows(REFUSED.items())


def _rows(lines: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "supported.md").write_text(page(), encoding="utf-8")
