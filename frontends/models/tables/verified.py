"""Numerical errors of compiled models against transformers for every family, measured by the tests."""

from __future__ import annotations

import json
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path

# family -> target -> way of running (full, chunked, decode) -> largest error, relative to the largest value
Errors = dict[str, dict[str, dict[str, float]]]
NAME = "verified.json"
GENAI = "genai.json"


def read_verified() -> Errors:
    """Return the committed errors; families that were never measured are absent."""
    file = files(__package__) / NAME
    errors: Errors = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return errors


def write_verified(errors: Errors) -> None:
    """Write `errors` as the committed errors, two digits, a line per family; only for tests in a checkout."""
    lines = []
    for family, targets in sorted(errors.items()):
        short = {target: {way: float(f"{e:.1e}") for way, e in ways.items()} for target, ways in targets.items()}
        lines.append(f"{json.dumps(family)}: {json.dumps(short)}")
    (Path(__file__).parent / NAME).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_genai() -> frozenset[str]:
    """Return the families whose compiled folders have a configuration of onnxruntime-genai, as the tests found."""
    file = files(__package__) / GENAI
    return frozenset(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else frozenset()


def write_genai(families: Collection[str]) -> None:
    """Write `families`, the result of the next `read_genai`; only for the tests, in a checkout."""
    (Path(__file__).parent / GENAI).write_text(json.dumps(sorted(families), indent=1) + "\n", encoding="utf-8")
