"""weft opt: the text it reads, rewrites and writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ...command import WATCHDOG, done, refused, start


def test_opt_rewrites_text_and_pipes_on(tiny: Path, tmp_path: Path) -> None:
    text = done("opt", tiny).stdout
    assert done("opt", "-", input=text).stdout == text
    packed = done("opt", "-", "-p", "pack-qkv", "--trace", input=text)
    assert packed.stdout == done("opt", tiny, "-p", "pack-qkv").stdout != text
    assert "pack-qkv: 3 rewrites" in packed.stderr
    done("opt", tiny, "-p", "default", "--verify", "-o", tmp_path / "a.weft", "--dump-ir", tmp_path / "steps")
    assert done("opt", tmp_path / "a.weft").stdout == (tmp_path / "a.weft").read_text()
    assert (tmp_path / "steps/00-input.weft").read_text() == text


def test_opt_reports_rewrites_and_idle_passes(tiny: Path) -> None:
    """A named pass that did nothing is worth a line, one of the default pipeline is not."""
    traced = done("opt", tiny, "-p", "default, drop-k-bias", "--trace", "-o", os.devnull).stderr
    assert "  pack-qkv: rewrote %layers.0.attn.q (× 3)" in traced and " FLOPs for 64 tokens, " in traced
    quiet = done("opt", tiny, "-p", "default, pack-qkv", "-o", os.devnull).stderr
    assert quiet.startswith("weft: pack-qkv rewrote nothing: ") and quiet.count("\n") == 1
    verified = done("opt", tiny, "-p", "pack-qkv, kv-cache", "--verify", "-o", os.devnull).stderr.splitlines()
    assert [line.partition("): ")[0] for line in verified] == ["weft: pack-qkv (exact", "weft: kv-cache (conditional"]
    assert verified[1].endswith("(two, if the model is large) equals the full pass.")


def test_opt_of_a_checkpoint_goes_through_a_pipe(minilm_folder: Path) -> None:
    text = done("opt", minilm_folder).stdout
    assert done("opt", "-", "-p", "cse, dce", input=text).stdout == done("opt", minilm_folder, "-p", "cse, dce").stdout


def test_text_errors_have_line_and_column(tiny: Path, tmp_path: Path) -> None:
    lines = done("opt", tiny).stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if " = linear(" in line)
    wrong = {
        "syntax": ([*lines[:at], lines[at].replace("linear(", "linear["), *lines[at + 1 :]], "expected ("),
        "type": ([*lines[:at], lines[at].replace("f32[", "f16["), *lines[at + 1 :]], "declared as f16"),
        "op": ([*lines[:at], lines[at].replace("linear(", "linaer("), *lines[at + 1 :]], "did you mean linear"),
    }
    for name, (text, words) in wrong.items():
        path = tmp_path / f"{name}.weft"
        path.write_text("\n".join(text))
        line = refused("opt", path)
        assert f"{path}:{at + 1}:" in line and words in line
        assert f"<stdin>:{at + 1}:" in refused("opt", "-", input="\n".join(text))


@pytest.mark.parametrize("pipeline", ["dce,", "dce cse", "dce{", "nothing", "dce{now=true}", "-cse"])
def test_bad_pipelines_are_one_error_line(tiny: Path, pipeline: str) -> None:
    assert "pipeline" in refused("opt", tiny, f"--passes={pipeline}")


def test_opt_keeps_an_older_file(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.weft").write_text("older")
    refused("opt", tiny, "-p", "nothing", "-o", tmp_path / "a.weft")
    assert (tmp_path / "a.weft").read_text() == "older"
    assert "holds files that weft did not write" in refused("opt", tiny, "-o", tmp_path)
    assert "no such file" in refused("opt", tiny, "-o", tmp_path / "nowhere/a.weft")
    assert {p.name for p in tmp_path.iterdir()} <= {"a.weft", "tiny.py", "__pycache__"}


def test_opt_writes_into_pipes_and_through_links(tiny: Path, tmp_path: Path) -> None:
    text = done("opt", tiny).stdout
    os.mkfifo(tmp_path / "pipe")
    process = start("opt", tiny, "-o", tmp_path / "pipe", cwd=tmp_path)
    assert (tmp_path / "pipe").read_text() == text
    assert process.communicate(timeout=WATCHDOG) == ("", "") and (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to("a.weft")
    done("opt", tiny, "-o", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a.weft").read_text() == text
