"""The device of the checks of this folder, set before Triton is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DEVICE = os.environ.get("WEFT_DEVICE", "cuda")  # "cpu" checks the checks where there is no GPU
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
