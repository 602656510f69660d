"""Pictures of quantized models: bits of a weight in labels, on sheets and in panels, and bytes as they are packed."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

import weft
from weft.backends.viz.model.network import Network, build_network
from weft.backends.viz.model.totals import compute_totals
from weft.backends.viz.onnx_files.onnx_network import read_onnx_network
from weft.frontends.app.api.draw.fact_sheet import build_fact_sheet
from weft.frontends.app.api.draw.pictures import draw
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.formats.weft.model_folder import write_model
from weft.frontends.model import Model
from weft.passes import run_passes

DECODER = weft.Decoder(
    128, 64, 2, weft.Block(weft.Attention(4, rope=weft.RoPE()), weft.GatedMLP(96), weft.RMSNorm()), context=64
)
PIPELINE = "quantize{bits=4, method=rtn}"


def quantized(pipeline: str = PIPELINE) -> Network:
    return build_network(run_passes(DECODER.graph(), pipeline))


def test_bytes_are_those_of_a_folder_of_codes(tmp_path: Path) -> None:
    model = rewrite(Model(DECODER.graph(), "model", "model"), PIPELINE)
    write_model(model, tmp_path / "out")
    stored = sum(array.nbytes for array in load_file(tmp_path / "out" / "model.safetensors").values())
    drawn = build_network(model.graph)
    weights = {w.name: w for v in drawn.vertices for w in v.weights}.values()
    # The norms are ones, which the folder does not store.
    learned = sum(w.bytes for w in weights if "frequencies" not in w.name and "norm" not in w.name)
    # Rows of 3 groups have zero points of 1.5 bytes in words, which a folder fills up.
    assert learned == pytest.approx(stored, rel=0.01)
    found = compute_totals(drawn, 64)
    assert found.weights == sum(w.bytes for w in weights) and "uint4_32" in found.dtypes
    rows = dict(build_fact_sheet(model).rows)
    assert (
        rows["Quantized"].endswith("bits, int4 groups of 32 and int8 groups of 32") and "quantized" in rows["Weights"]
    )


def test_a_decode_step_reads_packed_weights() -> None:
    plain = build_network(DECODER.graph())
    for before, after in zip(plain.vertices, quantized().vertices, strict=True):
        binding = {"batch": 1, "seq": 8, "past": 0, "total": 8, "capacity": 8}
        one, two = (v.step.evaluate(binding, 2) for v in (before, after))
        assert one["flops"] == two["flops"] and one["written"] == two["written"]
        saved = 0
        if after.op == "linear":
            (weight,) = after.weights
            rows, width = map(int, weight.dims)
            assert weight.bits is not None
            saved = rows * width * 2 - round(rows * width * weight.bits / 8)
        assert one["read"] - two["read"] == saved


@pytest.mark.parametrize("ending", ["html", "svg", "mmd", "txt", "dot"])
def test_labels_say_bits(ending: str, tmp_path: Path) -> None:
    model = rewrite(Model(DECODER.graph(), "model", "model"), PIPELINE)
    draw(model, tmp_path / f"picture.{ending}")
    shown = (tmp_path / f"picture.{ending}").read_text()
    assert "4.62 bits, int4 groups of 32" in shown and "8.5 bits, int8 groups of 32" in shown
    if ending == "html":
        assert "int4, groups of 32 with zero points; " in shown  # for the panel
    draw(Model(DECODER.graph(), "model", "model"), tmp_path / f"plain.{ending}")
    plain = (tmp_path / f"plain.{ending}").read_text()
    assert "groups of 32" not in plain


def test_layers_of_other_bits_are_other_parts(tmp_path: Path) -> None:
    model = Model(DECODER.graph(), "model", "model")
    mixed = rewrite(model, 'quantize{bits=4, method=rtn, keep="layers.1.*"}, quantize{bits=8, method=rtn}')
    draw(mixed, tmp_path / "a.txt")
    lines = (tmp_path / "a.txt").read_text().splitlines()
    (first,) = (line for line in lines if "layers 0" in line or "layer 0" in line)
    assert "× 2" not in first


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(("target", "bits"), [("ort-cpu", 4), ("ort-cpu", 8), ("ort-cuda", 4)])
def test_files_tell_the_bits_of_their_weights(experts: bool, target: str, bits: int, tmp_path: Path) -> None:
    """Codes are packed there, tables behind a Reshape, and scales behind a Cast; the sizes are those of the model."""
    ffn = weft.MoE(4, 64, 2) if experts else weft.GatedMLP(64)
    block = weft.Block(weft.Attention(4, rope=weft.RoPE()), ffn, weft.RMSNorm())
    model = weft.Decoder(128, 64, 1, block, context=64)
    weft.compile(model, tmp_path / "out", target=target, dtype="f16" if target == "ort-cuda" else None,
                 passes=f"quantize{{bits={bits}, head={bits}, method=rtn, zeros=false}}, default")  # fmt: skip
    drawn = read_onnx_network(tmp_path / "out" / "model.onnx")
    assert not any(v.op in ("Reshape", "Cast") and not v.reads for v in drawn.vertices)
    packed = [w for v in drawn.vertices for w in v.weights if w.bits is not None]
    assert {w.packing for w in packed} == {f"int{bits}, groups of 32"}
    assert {w.bits for w in packed} == {bits + 0.5}
    (embed,) = (v.equivalent for v in drawn.vertices if v.equivalent is not None and v.equivalent.op == "embedding")
    assert embed.weights[0].dims == ("128", "64")
    # Norms of ones are one tensor in the file.
    original = {w.name: w for v in build_network(model.graph()).vertices for w in v.weights if len(w.dims) > 1}
    found = [w.learned for v in drawn.vertices for w in v.weights if len(w.dims) > 1]
    assert sum(found) == sum(w.learned for w in original.values())
