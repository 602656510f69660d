"""Tests here need an NVIDIA GPU: without one, a plain `pytest` does not collect them; named by path, they run."""

from __future__ import annotations

import sys
from pathlib import Path

from ..device import gpus

sys.path.append(str(Path(__file__).parent))  # its files are scripts too, which find each other by bare name
collect_ignore_glob = [] if gpus() else ["test_*.py"]
