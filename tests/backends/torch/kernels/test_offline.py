"""Shipped kernels compile for an H200: 16-byte loads, no spills, dependent launch as meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ....sampling import ALL

PARTS = 2 if ALL else 1  # processes that share the variants, one per test; a full run compiles each variant


def most_issued(label: str) -> float:
    """Return the largest share of memory time that issuing instructions may take."""
    if " fp4 " in f"{label} ":  # floats that are decoded and multiplied by their scales, each by itself
        return 1.95
    if "BITS=" in label:
        if "NORM=none" not in label and "BLOCK_M=1 " not in label:
            return 1.1  # an RMS norm of each step of many rows
        return 1.1 if "GROUP=32" in label else 0.9
    return 0.6 if "NORM=layer" in label else 0.5


def compiled(config: pytest.Config, folder: Path, script: str, *arguments: str) -> Any:
    """Run a script of this folder that compiles kernels: what it prints."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    kept = config.cache.mkdir("triton") if config.cache else folder
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *arguments],
        env={**env, "TRITON_CACHE_DIR": str(kept)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("part", range(PARTS))
def test_shipped_kernels_compile_without_spills(part: int, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Only variants whose hash is not the recorded one are compiled, and one that must be as recorded; what is recorded
    under the other version of Triton is held to the same, and to the code of today by its hash."""
    found = compiled(pytestconfig, tmp_path, "offline.py", str(part), str(PARTS))
    assert found
    wrong = []
    for label, facts, known, old in found:
        assert not old, f"{label} has changed: run `python tests/backends/torch/kernels/offline.py --write` there"
        assert known in (None, facts), f"{label} compiles to something else than is recorded: {facts}"
        wants = facts["wants"]
        good = {
            "spills": facts["stack"] == facts["local"] == 0,
            "16-byte loads": facts["vector_loads"] > 0 or not wants["vectors"],
            "dependent launch": (facts["waits"] > 0 and facts["launches_dependents"] > 0) or not wants["pdl"],
            "loads before the wait": facts["loads_ahead"] > 0 or not wants["ahead"],
        }
        if "issue" in facts and " *bf16 " in label and ("NORM=none" in label or "linear_residual" not in label):
            good["issue of instructions"] = facts["issue"] <= most_issued(label)
        wrong += [f"{label}: {what}: {facts}" for what, ok in good.items() if not ok]
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_generated_kernels_compile(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Those of recurrences of one's own: no spills, dependent launch, for matrices 16-byte loads; and one of every op,
    of which sines of large numbers need a stack."""
    found = compiled(pytestconfig, tmp_path, "scans.py")
    assert found.pop("every op")["vector_loads"] > 0 < found["RWKV-7"]["vector_loads"]
    for name, facts in found.items():
        assert facts["stack"] == facts["local"] == 0 and facts["reg"] <= 64, f"{name}: {facts}"
        assert facts["waits"] > 0 and facts["launches_dependents"] > 0, f"{name}: {facts}"
