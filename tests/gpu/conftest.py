"""Tests here need an NVIDIA GPU: without one, a plain `pytest` does not collect them; named by path, they run."""

from __future__ import annotations

from ..device import gpus

collect_ignore_glob = [] if gpus() else ["test_*.py"]
