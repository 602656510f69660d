"""weft inspect --weights: sizes without compiling, against the tensors in folders compiled so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

import weft
from weft.frontends.app.api.inspect.weight_sizes import compute_weight_sizes
from weft.frontends.formats.gguf.reader import GGUFTensors
from weft.frontends.model import Model
from weft.ir import WeftError

from .....passes.library.quantize.checkpoints import in_memory
from .....sampling import by_turns
from ....command import done, refused
from ...llamas import write_llama
from ..test_weights import ARCHITECTURE, MODELS


def stored(folder: Path) -> dict[str, int]:
    """Bytes of every tensor of floats or codes in a folder by name, as onnx or safetensors reads them."""
    if (folder / "model.onnx").is_file():
        graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
        sizes, known = dict[str, int](), set[str | bytes]()
        for tensor in graph.initializer:
            where = {entry.key: entry.value for entry in tensor.external_data}
            raw = tensor.raw_data or onnx.numpy_helper.to_array(tensor).tobytes() if not where else b""
            # A tied table is two initializers of the same bytes, which count once.
            place: str | bytes = where["offset"] if where else raw
            size = int(where["length"]) if where else len(raw)
            sizes[tensor.name] = 0 if place in known else size
            known.add(place)
        return {name: size for name, size in sizes.items() if "." in name}
    return {name: array.nbytes for name, array in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize(
    ("weights", "target", "name"),
    by_turns(
        ["int8", "int4{method=rtn}", "int4{method=hqq}", "int3{method=rtn, group=64, zeros=false}"],
        ["ort-cpu", "onnx", "torch"],
        MODELS,
    ),
)
def test_sizes_are_those_of_the_folder(name: str, target: str, weights: str, tmp_path: Path) -> None:
    model = Model(in_memory(MODELS[name].graph()), name, name)
    sizes = compute_weight_sizes(model, weights, target)
    weft.compile(model, tmp_path / "out", target=target, weights=weights)
    tensors = stored(tmp_path / "out")
    assert sizes.total == pytest.approx(sum(tensors.values()), rel=0.01)
    assert sum(part["bytes"] for part in sizes.kinds.values()) == sizes.total
    manifest = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert manifest["weights"] == {"kinds": sizes.kinds, "layers": sizes.layers}
    assert sizes.blocks == manifest.get("blocks", {})
    head = [size for key, size in tensors.items() if key.startswith("lm_head" if name != "tied" else "embed")]
    assert sizes.kinds["output head"] == {"numbers": 97 * 64, "bytes": sum(head)}
    linear = [n for k, n in tensors.items() if (".attn." in k or ".ffn." in k) and not _other(k)]
    assert sizes.kinds["linear maps"]["bytes"] == sum(linear)
    assert sizes.bits is not None and (sizes.bits < 32) == bool(sizes.blocks)


def _other(name: str) -> bool:
    return any(word in name for word in ("router", "experts", ".bias"))


def _forbid_fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.passes.library.quantize.quantize.fit_gptq", lambda *_: pytest.fail("weights are fitted"))


def test_sizes_of_gptq_need_no_fitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(0, 50, (24, 32)))
    model = Model(in_memory(MODELS["tied"].graph()), "tied", "tied")
    weights = f"int4{{calibration={tmp_path / 'ids.npy'}}}"
    weft.compile(model, tmp_path / "out", weights=weights)
    _forbid_fitting(monkeypatch)
    sizes = compute_weight_sizes(model, weights, "ort-cpu")
    assert sizes.total == pytest.approx(sum(stored(tmp_path / "out").values()), rel=0.01)
    assert sizes.blocks == json.loads((tmp_path / "out" / "weft.json").read_text())["blocks"]


def test_sizes_of_a_model_with_a_tokenizer_need_no_fitting(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file stores groups of 32, so that compile fits these codes to a text."""
    _forbid_fitting(monkeypatch)
    sizes = compute_weight_sizes(weft.load_source(smollm2_gguf), "int4{group=64}", "ort-cpu")
    assert sizes.blocks == {"int8_64": 2, "uint4_64": 150}


def test_weights_of_a_checkpoint_are_not_read(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weft.compile(smollm2_gguf, tmp_path / "out", weights="int4{method=rtn, group=64}")
    model = weft.load_source(smollm2_gguf)
    monkeypatch.setattr(GGUFTensors, "read", lambda *_: pytest.fail("a weight is read"))
    sizes = compute_weight_sizes(model, "int4{method=rtn, group=64}", "ort-cpu")
    assert sizes.total == pytest.approx(sum(stored(tmp_path / "out").values()), rel=0.01)
    # 4 bits, a scale in f16 and a zero point of 4 bits for 64 numbers; every row has an odd number of groups at most.
    assert sizes.bits == pytest.approx(4 + 20 / 64, rel=0.01)


def test_the_command_shows_kinds_and_refuses(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(ARCHITECTURE)
    shown = done("inspect", tmp_path / "tiny.py", "--weights", "int4").stdout
    assert "weights as int4 for ort-cpu in f32" in shown and "blocks: 1 as int8_32, 5 as uint4_32" in shown
    found = json.loads(done("inspect", tmp_path / "tiny.py", "--weights", "int4", "--dtype", "f16", "--json").stdout)
    assert found["weights"]["dtype"] == "f16"
    assert found["weights"]["bits_per_weight"] == pytest.approx(4 + 16 / 32 + 8 / 64)
    # DequantizeLinear makes no bf16.
    plain = ("--weights", "int4", "--target", "onnx", "--dtype", "bf16")
    assert "no blocks" in done("inspect", tmp_path / "tiny.py", *plain).stdout
    assert "--weights 'int5' is not known" in refused("inspect", tmp_path / "tiny.py", "--weights", "int5")
    assert "unknown target" in refused("inspect", tmp_path / "tiny.py", "--weights", "int4", "--target", "tpu")
    assert "does not support bf16" in refused("inspect", tmp_path / "tiny.py", "--weights", "int4", "--dtype", "bf16")


def test_targets_that_say_nothing_are_named() -> None:
    model = Model(in_memory(MODELS["tied"].graph()), "tied", "tied")
    with pytest.raises(WeftError, match="unknown target"):
        compute_weight_sizes(model, "int4", "nonesuch")


def test_sizes_of_8_bits_take_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels are scaled by a text when the model is compiled; sizes do not hang on it."""
    source = write_llama(tmp_path / "llama", 0)
    weft.compile(source, tmp_path / "out", weights="int8")
    place = "weft.passes.library.quantize.scale_channels.sample_tokens"
    monkeypatch.setattr(place, lambda *_: pytest.fail("a text is read"))
    sizes = compute_weight_sizes(weft.load_source(source), "int8", "ort-cpu")
    manifest = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert "scale-channels" in manifest["pipeline"]
    assert manifest["weights"] == {"kinds": sizes.kinds, "layers": sizes.layers} and sizes.blocks == manifest["blocks"]
