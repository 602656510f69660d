"""The PyTorch source of SmolLM2, kept so that a change of it is seen in review; docs/torch.md shows its core.

After a change that is meant: ``WEFT_GOLDEN=write pytest tests/golden``, and read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

from weft import load_source
from weft.backends.torch.codegen.model_source import write_source

from ..lowered import lower


def test_smollm2_source_equals_golden_file() -> None:
    path = Path(__file__).with_name("smollm2.py.txt")
    text = write_source(lower(load_source("smollm2-135m").graph)).text
    if os.environ.get("WEFT_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
