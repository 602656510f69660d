"""The table of families, for `weft families` and the docs: libraries that read and write each, and its errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .family import Family
from .other_types import MULTIMODAL, PAIRS, REFUSED
from .verified import read_genai, read_verified

WAYS = ("full", "chunked", "decode")
TARGETS = ("onnx", "ort-cpu", "torch")
_PAGE = """# Supported families

Every family that weft reads from Hugging Face folders, by its `model_type`. `weft families` prints this table, and
`weft families --write-docs docs/supported.md` writes this page.

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


def overview(families: Mapping[str, Family]) -> list[tuple[str, ...]]:
    """Return the table as rows: the column titles, then a row per family, sorted by name."""
    errors, genai = read_verified(), read_genai()
    rows: list[tuple[str, ...]] = [("family", "exported", "GGUF", "genai", *TARGETS)]
    for name in sorted(families):
        family, architecture = families[name], families[name].gguf
        gguf = "" if architecture is None else architecture.model_types[0] + ("+" if architecture.loader else "")
        worst = (_worst(errors.get(name, {}), target) for target in TARGETS)
        rows.append((name, family.transformers, gguf, "yes" if name in genai else "", *worst))
    return rows


def page(families: Mapping[str, Family]) -> str:
    """Return the table and the refused types as a page of Markdown."""
    head, *rows = overview(families)
    lines = [head, tuple("---" for _ in head), *rows]
    text = _PAGE.replace("{multimodal}", ", ".join(MULTIMODAL)).replace("{pairs}", ", ".join(PAIRS))
    return text + _rows(lines) + _REFUSED + _rows(REFUSED.items())


def _rows(lines: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def _worst(errors: Mapping[str, Mapping[str, float]], target: str) -> str:
    ways = errors.get(target, {})
    return f"{max(ways.values()):.1e}" if ways else ""
