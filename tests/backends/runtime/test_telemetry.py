"""ONNX Runtime sends usage data unless the environment forbids it at import: weft's imports do, wherever they are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

USE = """
import sys
import weft
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

block = Block(Attention(heads=2, rope=RoPE()), GatedMLP(64), RMSNorm())
weft.compile(Decoder(vocab=32, dim=64, layers=1, block=block), target="ort-cpu", out=sys.argv[1], prepack=True)
weft.load(sys.argv[1]).generate([1, 2], max_tokens=2)
"""


@pytest.mark.long
def test_no_connection_and_no_file_outside_the_output(tmp_path: Path, root: Path) -> None:
    home, out, calls = tmp_path / "home", tmp_path / "out", tmp_path / "calls"
    home.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(home), "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    traced = ["strace", "-f", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o", str(calls)]
    watch = traced if shutil.which("strace") else []  # native code passes by Python's audit hooks
    for command in (["-c", USE, str(out)], ["-m", "weft", "run", str(out), "--ids", "1,2", "--max-tokens", "2"]):
        subprocess.run([*watch, sys.executable, *command], env=environment, check=True, capture_output=True)
        assert [path for path in home.rglob("*") if path.is_file()] == []
        if watch:
            assert "AF_INET" not in calls.read_text()


@pytest.mark.parametrize("before", [None, "0"])
def test_telemetry_setting_of_the_user_is_not_changed(before: str | None) -> None:
    from weft.backends.runtime.ort.session import import_onnxruntime

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ORT_DISABLE_TELEMETRY")
        if before is not None:
            patch.setenv("ORT_DISABLE_TELEMETRY", before)
        import_onnxruntime()
        assert os.environ["ORT_DISABLE_TELEMETRY"] == (before or "1")


def test_onnxruntime_is_imported_in_one_module(root: Path) -> None:
    """Everything else asks `onnxruntime()`, whose file names the module in a call of importlib."""
    folders = ("ir", "passes", "backends", "frontends", "benchmarks", "examples")
    sources = [path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".py", ".j2")]
    imports = re.compile(r"^ *(import|from) onnxruntime|import_module\(.onnxruntime.\)", re.MULTILINE)
    found = [path for path in sources if imports.search(path.read_text("utf-8"))]
    assert [path.relative_to(root) for path in found] == [Path("backends/runtime/ort/session.py")]
