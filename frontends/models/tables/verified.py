"""Numerical errors of compiled models against transformers for every family, measured by the tests."""

from __future__ import annotations

import json
from importlib.resources import files

# family -> target -> way of running (full, chunked, decode) -> largest error, relative to the largest value
Errors = dict[str, dict[str, dict[str, float]]]
NAME = "verified.json"
GENAI = "genai.json"


def read_verified() -> Errors:
    """Return the committed errors; families that were never measured are absent."""
    file = files(__package__) / NAME
    errors: Errors = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return errors


def read_genai() -> frozenset[str]:
    """Return the families whose compiled folders have a configuration of onnxruntime-genai, as the tests found."""
    file = files(__package__) / GENAI
    return frozenset(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else frozenset()
