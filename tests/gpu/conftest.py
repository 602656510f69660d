"""Tests here need an NVIDIA GPU: without one, pytest does not collect them, but for a dry run on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

from ..device import gpus

sys.path.append(str(Path(__file__).parent))  # its files are scripts too, which find each other by bare name
tests = {path.name for path in Path(__file__).parent.glob("test_*.py")}
collect_ignore = [] if gpus() else sorted(tests - {"test_dry_runs.py"})  # which runs some of the others on the CPU
