"""Shipped kernels compile for an H200: 16-byte loads, no spills, dependent launch as meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("part", range(PARTS))
def test_what_ships_compiles_to_good_machine_code(part: int, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Only variants whose hash is not the recorded one are compiled, and one that must be as recorded; what is recorded
    under the other version of Triton is held to the same, and to the code of today by its hash."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    kept = pytestconfig.cache.mkdir("triton") if pytestconfig.cache else tmp_path
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("offline.py"), str(part), str(PARTS)],
        env={**env, "TRITON_CACHE_DIR": str(kept)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
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
