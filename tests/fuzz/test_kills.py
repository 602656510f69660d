"""A short run of the kill test; `make kills` is a long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..sampling import ALL


@pytest.mark.long
def test_killed_commands_leave_complete_results(root: Path) -> None:
    kills, replacements, reads = (14, 10, 1000) if ALL else (7, 5, 300)  # of seven commands
    numbers = [f"--kills={kills}", f"--replacements={replacements}", f"--reads={reads}"]
    command = [sys.executable, "-m", "tests.fuzz.kills", *numbers]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), *filter(None, sys.path)])}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"]["all"] == kills and found["kills"]["broken"] == 0
    assert found["polling"]["reads"] >= reads and found["polling"]["missed"] == 0
