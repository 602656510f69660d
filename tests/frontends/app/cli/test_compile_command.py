"""weft compile: the folder it writes, and what it leaves behind when it cannot."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ....sampling import others_long
from ...command import TINY, WATCHDOG, done, largest_file, refused, start


def test_compile_writes_a_folder_and_reports_random_weights(tiny: Path, tmp_path: Path) -> None:
    result = done("compile", tiny, "-o", tmp_path / "out", "--seed", 3, "--max-length", 32)
    assert "architecture tiny.py:model" in result.stdout
    assert result.stderr == "weft: architecture tiny.py:model has no checkpoint: its weights are random (seed 3)\n"
    manifest = json.loads((tmp_path / "out/weft.json").read_text())
    assert manifest["max_length"] == 32 and manifest["source"]["seed"] == 3
    assert manifest["source"]["spec"] == str(tiny)


def test_max_length_beyond_the_context_is_noted(tiny: Path, tmp_path: Path) -> None:
    """64 tokens are the architecture's."""

    def told(*args: str | int) -> str:
        return done("compile", tiny, "-o", tmp_path / "out", *args).stderr

    assert "states a context of 64 tokens: beyond it, up to the --max-length 100,000" in told("--max-length", 100_000)
    for target in ("onnx", "torch"):
        assert "states a context of 64 tokens" in told("--max-length", 65, "--target", target)
    assert "states a context" not in told("--max-length", 64) + told()
    longer = ("-p", "extend-context{method=pi, factor=2}, default")
    assert "states a context" not in told("--max-length", 128, *longer)
    assert "states a context of 128 tokens" in told("--max-length", 129, *longer)


def test_compile_dumps_and_verifies(tiny: Path, tmp_path: Path) -> None:
    done("compile", tiny, "-o", tmp_path / "out", "--dump-ir", tmp_path / "steps", "--verify", "--passes", "pack-qkv")
    written = [str(path.relative_to(tmp_path / "steps")) for path in sorted((tmp_path / "steps").rglob("*.weft"))]
    assert written == ["00-input.weft", "01-pack-qkv.weft", "model/00-input.weft", "model/01-legalize.weft"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-p", "fuse-everything"), ("unknown pass 'fuse-everything'",)),
        (("-p", "cast{dtyp=f16}"), ("no argument 'dtyp'", "dtype")),
        (("-p", "cast{dtype=f17}"), ("f17",)),
        (("--dtype", "bf16"), ("ort-cpu does not support bf16", "f32")),
        (("--dtype", "f8"), ("unknown dtype 'f8'; known are f32",)),
        (("--target", "ort-gpu"), ("unknown target 'ort-gpu'", "ort-cpu")),
        (("--max-length", "0"), ("--max-length is 0",)),
        (("--max-length", "many"), ("many", "weft compile --help")),
        (("--max-lenght", "9"), ("--max-lenght", "weft compile --help")),
    ],
)
def test_bad_options_leave_the_previous_folder(
    tiny: Path, tmp_path: Path, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done("compile", tiny, "-o", tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    line = refused("compile", tiny, "-o", tmp_path / "out", *args)
    assert all(word in line for word in words)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert {p.name for p in tmp_path.iterdir()} <= {"tiny.py", "out", "__pycache__"}


def test_invalid_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/config.json").write_text('{"model_type": "nonesuch"}')
    assert "nonesuch" in refused("compile", tmp_path / "strange", "-o", tmp_path / "out")
    assert "smollm2-135m" in refused("compile", "smollm2-135n", "-o", tmp_path / "out")
    (tmp_path / "broken.py").write_text("model = nothing")
    assert "broken.py:1" in refused("compile", tmp_path / "broken.py", "-o", tmp_path / "out")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    assert "broken.gguf" in refused("inspect", tmp_path / "broken.gguf")


@pytest.mark.parametrize("target", ["ort-cpu", "torch"])
def test_output_that_cannot_be_written_is_refused(tiny: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.jpg").write_text("mine")
    for out, words in (("file", "in the way"), ("file/out", str(tmp_path / "file/out")), ("photos", "photos")):
        assert words in refused("compile", tiny, "-o", tmp_path / out, "--target", target)
    assert (tmp_path / "photos/a.jpg").read_text() == (tmp_path / "file").read_text() == "mine"


def large(tmp_path: Path) -> Path:
    """An architecture of 800 MB, which takes seconds to write."""
    path = tmp_path / "large.py"
    path.write_text(TINY.replace("vocab=12, dim=32", "vocab=200_000, dim=1024"))
    return path


WEIGHTS = {"ort-cpu": "model.onnx.data", "torch": "model.safetensors"}


@pytest.mark.parametrize(
    ("number", "status", "target"),
    others_long([(signal.SIGTERM, 143, "ort-cpu"), (signal.SIGINT, 130, "ort-cpu"), (signal.SIGINT, 130, "torch")]),
)
def test_an_interrupted_compile_leaves_nothing(
    tmp_path: Path, number: signal.Signals, status: int, target: str
) -> None:
    source = large(tmp_path)
    process = start("compile", source, "-o", tmp_path / "out", "--target", target, cwd=tmp_path)
    deadline = time.monotonic() + WATCHDOG
    while not any(f.stat().st_size for f in tmp_path.glob(f".weft-partial-*/{WEIGHTS[target]}")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=WATCHDOG)
    assert (process.returncode, out) == (status, "")
    assert err in ("weft: interrupted\n", "weft: terminated\n")
    assert {p.name for p in tmp_path.iterdir()} <= {"large.py", "__pycache__"}


@pytest.mark.parametrize("target", WEIGHTS)
def test_full_disk_is_one_error_line(tiny: Path, tmp_path: Path, target: str) -> None:
    with largest_file(20_000):
        line = refused("compile", tiny, "-o", tmp_path / "out", "--target", target)
    assert line.startswith(f"weft: error: cannot write to {tmp_path / 'out'}: ")
    assert {p.name for p in tmp_path.iterdir()} <= {"tiny.py", "__pycache__"}


def test_disk_that_fills_up_before_the_tokenizer_leaves_no_output(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def full(path: Path, *args: Any, **options: Any) -> int:
        if path.name == "tokenizer.json":
            raise OSError(28, "No space left on device", str(path))
        return write(path, *args, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert "the disk is full" in refused("compile", smollm2_gguf, "--max-length", "16", "-o", tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("length", [2**24 + 1, 2**63, 10**400])
def test_max_length_beyond_the_limit_is_refused(length: int, tmp_path: Path) -> None:
    line = refused("compile", "gpt2", "--max-length", length, "-o", tmp_path / "out")
    assert "--max-length" in line and list(tmp_path.iterdir()) == []


def test_options_of_targets_are_flags_of_compile() -> None:
    from weft.backends.target import TARGETS, collect_options

    text = " ".join(done("compile", "--help").stdout.split())
    assert f"The target: {', '.join(TARGETS)};" in text
    for option, targets in collect_options().values():
        assert f"{option.flag} " in text
        assert text.replace("- ", "-").count(f"(target{'s' * (len(targets) > 1)} {', '.join(targets)})")
