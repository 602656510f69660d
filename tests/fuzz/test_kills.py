"""A short run of the kill test; `make kills` is a long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_kills_and_readers_find_whole_results(root: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.kills", "--kills=14", "--replacements=10", "--reads=1000"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), *filter(None, sys.path)])}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"]["all"] == 14 and found["kills"]["broken"] == 0
    assert found["polling"]["reads"] >= 1000 and found["polling"]["missed"] == 0
