"""`--json` of compile, export and opt: what was written, as one document on stdout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weft

from ...command import done


def read(*arguments: str | Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(done(*arguments, "--json").stdout)
    return result


def sizes(folder: Path) -> dict[str, int]:
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def test_compile_lists_files_passes_and_seconds(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    document = read("compile", tiny, "-o", out, "--verify", "-p", "sliding-window{size=16}, default")
    assert document["files"] == sizes(out) and document["out"] == str(out)
    passes = {record["pass"]: record for record in document["passes"]}
    window, packed = passes["sliding-window{size=16}"], passes["pack-qkv"]
    assert (window["effect"], window["rewrites"]) == ("conditional", {"sliding-window": 3})
    assert packed["rewrites"] == {"pack-qkv": 3} and packed["nodes"][0] > packed["nodes"][1]
    assert packed["checked"].startswith("Outputs before and after agree") and packed["difference"] < 1e-12
    assert list(document["seconds"]) == ["load", "passes", "write"] and min(document["seconds"].values()) >= 0
    assert document["versions"]["weft"] == weft.__version__ and "onnx" in document["versions"]
    assert document["weight_bytes"] > 0 and document["refused_lowerings"] == []


def test_explained_lines_are_part_of_the_document(tiny: Path, tmp_path: Path) -> None:
    document = read("compile", tiny, "-o", tmp_path / "out", "--target", "torch", "--explain")
    assert len(document["explained"]) > 3


@pytest.mark.parametrize("out", ["rewritten", "rewritten.weft", "-"])
def test_opt_lists_what_it_wrote(out: str, tiny: Path, tmp_path: Path) -> None:
    path = out if out == "-" else str(tmp_path / out)
    document = read("opt", tiny, "-p", "pack-qkv, dce", "-o", path)
    assert [record["effect"] for record in document["passes"]] == ["exact", "exact"]
    written = Path(path)
    expected = {} if out == "-" else sizes(written) if written.is_dir() else {out: written.stat().st_size}
    assert document["files"] == expected
    assert ("graph" in document) == (out == "-") and document["nodes"] > 0
    assert any("rewrote nothing" in note for note in document["passes"][1]["notes"])


def test_export_names_the_family(tiny: Path, tmp_path: Path) -> None:
    document = read("export", tiny, "-o", tmp_path / "hf", "-p", "sliding-window{size=16}")
    assert document["family"] == "mistral" and document["files"] == sizes(tmp_path / "hf")
    assert [record["pass"] for record in document["passes"]] == ["sliding-window{size=16}"]
