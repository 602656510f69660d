"""Folders of target web for live pages: the model, its description, and the scripts that run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import weft
from weft.backends.onnx.web.live_folder import PACKAGES, RUNTIME, TOKENIZERS, WASM
from weft.ir import WeftError

from ....e2e.head_models import BERT, save

PASSES = "ablate, expose{what=everything}"


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A node_modules folder with empty scripts in the right versions."""
    folder = tmp_path / "node_modules"
    for package, version in PACKAGES.items():
        (folder / package).mkdir(parents=True)
        (folder / package / "package.json").write_text(json.dumps({"version": version}))
    for file in (RUNTIME, WASM, TOKENIZERS):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(b"\0" * 4096)
    return folder


def test_folders_have_all_that_a_page_loads(modules: Path, tmp_path: Path) -> None:
    save(tmp_path / "hf", "BertForMaskedLM", BERT)
    report = weft.compile(
        tmp_path / "hf", tmp_path / "out", target="web", page="live", passes=PASSES, javascript=str(modules)
    )
    assert report.notes == []
    described = json.loads((tmp_path / "out/live.json").read_text())
    assert (described["kind"], described["vocabulary"], described["context"]) == ("encoder", 40, 32)
    files = [
        described["model"],
        *described["data"],
        *(described[n] for n in ("runtime", "wasm", "tokenizers")),
        "live.js",
    ]
    assert all((tmp_path / "out" / file).is_file() for file in files)
    assert (tmp_path / "out" / described["wasm"]).stat().st_size < 200


def test_without_packages_the_page_loads_them_from_a_cdn(tmp_path: Path) -> None:
    save(tmp_path / "hf", "BertForMaskedLM", BERT)
    report = weft.compile(tmp_path / "hf", tmp_path / "out", target="web", page="live", passes=PASSES)
    assert report.notes == ["the page loads onnxruntime-web from cdn.jsdelivr.net; see --javascript"]
    described = json.loads((tmp_path / "out/live.json").read_text())
    version = PACKAGES["onnxruntime-web"]
    assert (
        described["runtime"] == f"https://cdn.jsdelivr.net/npm/onnxruntime-web@{version}/dist/ort.wasm.bundle.min.mjs"
    )


def test_other_versions_are_refused(modules: Path, tmp_path: Path) -> None:
    save(tmp_path / "hf", "BertForMaskedLM", BERT)
    (modules / "onnxruntime-web/package.json").write_text('{"version": "1.2.3"}')
    with pytest.raises(WeftError, match=r"onnxruntime-web has version 1\.2\.3, but the page is for 1\.31"):
        weft.compile(
            tmp_path / "hf", tmp_path / "out", target="web", page="live", passes=PASSES, javascript=str(modules)
        )
    with pytest.raises(WeftError, match="nowhere has no onnxruntime-web: run `npm install"):
        weft.compile(tmp_path / "hf", tmp_path / "out", target="web", page="live", passes=PASSES, javascript="nowhere")
    assert not (tmp_path / "out").exists()
