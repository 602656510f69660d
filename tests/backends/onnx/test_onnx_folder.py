"""Folders for ONNX Runtime: models, configuration of onnxruntime-genai, and facts for the manifest."""

from __future__ import annotations

import json
from pathlib import Path

import weft
from weft.backends.onnx import export

from .small_decoder import decoder


def test_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    for target in ("ort-cpu", "onnx"):
        tied = weft.compile(decoder(tie=True), tmp_path / f"tied-{target}", target=target)
        untied = weft.compile(decoder(tie=False), tmp_path / f"untied-{target}", target=target)
        assert untied.weight_bytes - tied.weight_bytes == 96 * 64 * 4
        stored = (tmp_path / f"tied-{target}" / "model.onnx.data").stat().st_size
        assert tied.weight_bytes <= stored + 16 * export.INLINE_BYTES


def test_manifest_and_genai_config_describe_the_model(tmp_path: Path) -> None:
    weft.compile(decoder(), tmp_path / "out", target="ort-cuda", dtype="bf16", max_length=32)
    manifest = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert (manifest["kind"], manifest["target"], manifest["dtype"]) == ("decoder", "ort-cuda", "bf16")
    assert (manifest["vocab"], manifest["max_length"], manifest["logits"]) == (96, 32, "last")
    wide = {"kv_heads": 2, "head_dim": 16, "window": None, "rolling": False, "capacity": None, "latent": False}
    assert manifest["cache"] == [{"layer": i, **wide} for i in range(2)]
    assert "kv-cache" in manifest["pipeline"]
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert config["model"]["type"] == "decoder"
    assert config["search"]["past_present_share_buffer"] is True
    assert config["model"]["decoder"]["session_options"]["provider_options"] == [{"cuda": {"enable_cuda_graph": "1"}}]
