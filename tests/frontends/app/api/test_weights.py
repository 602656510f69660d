"""Weights in fewer bits by one word: folders of every target against the float64 meaning of the quantized graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import weft
from weft.frontends.app.api.source.sources import load_source
from weft.frontends.app.api.verify.verification import verify_folder
from weft.frontends.app.api.weights import expand_weights
from weft.frontends.model import Model
from weft.ir import Graph, WeftError, interpret
from weft.ir.recipes.blocks import Dequantize, Float4, Float8
from weft.passes import run_passes
from weft.passes.fitting import quantizing

from ....passes.library.quantize.checkpoints import USED, in_memory
from ....sampling import by_turns
from ...command import done, refused, weft_command

TARGETS = ("ort-cpu", "torch", "onnx")
VOCAB, DIM = 97, 64
BLOCK = weft.Block(weft.Attention(4, kv_heads=2, rope=weft.RoPE()), weft.GatedMLP(96), weft.RMSNorm())
ARCHITECTURE = """
import weft
model = weft.Decoder(97, 64, 1, weft.Block(weft.Attention(2), weft.GatedMLP(64), weft.RMSNorm()), tie_embeddings=True)
"""
MODELS = {
    "tied": weft.Decoder(VOCAB, DIM, 2, BLOCK, context=64, tie_embeddings=True),
    "mixture": weft.Decoder(
        VOCAB, DIM, 2, weft.Block(weft.Attention(4, rope=weft.RoPE()), weft.MoE(4, 32, 2), weft.RMSNorm()), context=64
    ),
    "biased": weft.Decoder(
        VOCAB,
        DIM,
        1,
        weft.Block(weft.Attention(4, qkv_bias=True, out_bias=True), weft.MLP(72, bias=True), weft.LayerNorm()),
        context=64,
    ),
}


@pytest.mark.parametrize(("name", "bits", "zeros"), by_turns(MODELS, (2, 4, 8), ("true", "false")))
def test_pytorch_computes_the_dequantized_numbers(name: str, bits: int, zeros: str) -> None:
    pipeline = (
        f"quantize{{bits={bits}, zeros={zeros}, group=16, method=rtn}}"
        if bits == 2
        else (f"quantize{{bits={bits}, zeros={zeros}, method=rtn}}")
    )
    graph = run_passes(in_memory(MODELS[name].graph()), pipeline)
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 20))
    inputs = {"input_ids": ids, "position_ids": np.arange(20)[None].repeat(2, 0)}
    exact = interpret(graph, {k: v for k, v in inputs.items() if k in graph.inputs})["logits"]
    network = weft.torch(graph)
    with torch.inference_mode():
        found = network(torch.from_numpy(ids))
    np.testing.assert_allclose(found.numpy(), exact, rtol=0, atol=5e-5 * np.abs(exact).max())


class ExactOptions(onnxruntime.SessionOptions):  # type: ignore[misc]  # it ships no types
    """Options of sessions that multiply in f32 where they fuse DequantizeLinear, instead of rounding activations."""

    def __init__(self) -> None:
        super().__init__()
        self.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")


@pytest.mark.parametrize(
    ("weights", "target", "name"), by_turns(["int8", "int4", "int4{zeros=false, group=16}", "int3"], TARGETS, MODELS)
)
def test_folders_of_every_target(
    name: str, target: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "SessionOptions", ExactOptions)
    model = Model(in_memory(MODELS[name].graph()), name, name)
    options = {"arithmetic": "f32"} if target == "ort-cpu" else {}
    report = weft.compile(model, tmp_path / "out", target=target, weights=weights, **options)
    loaded = weft.load(tmp_path / "out", trust=target == "torch")
    ids = np.random.default_rng(1).integers(0, VOCAB, 20).tolist()
    graph = run_passes(model.graph, expand_weights(model.graph, weights))
    exact = _logits(graph, ids)
    found = loaded.logits(ids)
    np.testing.assert_allclose(found[-1], exact[-1], rtol=0, atol=5e-5 * np.abs(exact).max())
    blocks = json.loads((tmp_path / "out" / "weft.json").read_text()).get("blocks", {})
    widened = target == "torch" and "group=16" in weights  # its kernels take 32 codes at a time
    assert bool(blocks) != widened and report.weight_bytes


def _logits(graph: Graph, ids: list[int]) -> np.ndarray:
    inputs = {"input_ids": np.array([ids]), "position_ids": np.arange(len(ids))[None]}
    found: np.ndarray = interpret(graph, {k: v for k, v in inputs.items() if k in graph.inputs})["logits"][0]
    return found


def test_floats_are_codes_in_folders_of_torch_and_numbers_in_others(tmp_path: Path) -> None:
    block = weft.Block(weft.Attention(4), weft.GatedMLP(256), weft.RMSNorm())
    model = Model(in_memory(weft.Decoder(VOCAB, 128, 1, block, context=64, tie_embeddings=True).graph()), "m", "m")
    ids = list(range(20))
    exact = _logits(run_passes(model.graph, "quantize{format=fp8}"), ids)
    for target in ("torch", "ort-cpu", "onnx"):
        report = weft.compile(model, tmp_path / target, target=target, weights="fp8")
        found = weft.load(tmp_path / target, trust=target == "torch").logits(ids)
        np.testing.assert_allclose(found[-1], exact[-1], rtol=0, atol=5e-5 * np.abs(exact).max())
        blocks = json.loads((tmp_path / target / "weft.json").read_text()).get("blocks", {})
        assert blocks == ({"f8e4m3_128": 8} if target == "torch" else {})
        assert any("stored dequantized, not as codes" in note for note in report.notes) == (target != "torch")


ENCODER = weft.Encoder(VOCAB, DIM, 1, weft.Block(weft.Attention(4, causal=False), weft.MLP(96), weft.LayerNorm()))


@pytest.mark.parametrize(("name", "target", "form"), by_turns([*MODELS, "odd"], TARGETS, ["mxfp4", "nvfp4"]))
def test_floats_of_4_bits_on_every_target(
    name: str, target: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes on PyTorch, integers of 8 bits that stand for the same on ONNX Runtime; experts are numbers, as are rows
    that end within a group on PyTorch."""
    monkeypatch.setattr(onnxruntime, "SessionOptions", ExactOptions)
    odd = weft.Decoder(VOCAB, 40, 1, weft.Block(weft.Attention(4), weft.GatedMLP(72), weft.RMSNorm()), context=64)
    model = Model(in_memory(MODELS.get(name, odd).graph()), name, name)
    options = {"arithmetic": "f32"} if target == "ort-cpu" else {}
    weft.compile(model, tmp_path / "out", target=target, weights=form, **options)
    ids = np.random.default_rng(1).integers(0, VOCAB, 20).tolist()
    exact = _logits(run_passes(model.graph, expand_weights(model.graph, form)), ids)
    found = weft.load(tmp_path / "out", trust=target == "torch").logits(ids)
    np.testing.assert_allclose(found[-1], exact[-1], rtol=0, atol=5e-5 * np.abs(exact).max())
    blocks = json.loads((tmp_path / "out" / "weft.json").read_text()).get("blocks", {})
    as_integers = f"int8_{32 if form == 'mxfp4' else 16}_f32"
    kinds = [] if (name, target) == ("odd", "torch") else [form if target == "torch" else as_integers]
    assert {*blocks} == ({*kinds, "int8_32"} if kinds else set())  # tables and heads are integers
    assert name != "tied" or sum(blocks.values()) >= 9


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_floats_of_4_bits_in_an_encoder(form: str, tmp_path: Path) -> None:
    model = Model(in_memory(ENCODER.graph()), "encoder", "encoder")
    graph = run_passes(model.graph, f"quantize{{format={form}}}")
    ids = np.random.default_rng(1).integers(0, VOCAB, (2, 12))
    feeds = {"input_ids": ids, "attention_mask": np.ones((2, 12), np.int64)}
    exact = interpret(graph, feeds)["last_hidden_state"]
    with torch.inference_mode():
        by_torch = weft.torch(graph)(*map(torch.from_numpy, feeds.values()))
    np.testing.assert_allclose(by_torch.numpy(), exact, rtol=0, atol=5e-5 * np.abs(exact).max())
    weft.compile(model, tmp_path / "out", target="ort-cpu", weights=form, arithmetic="f32")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    (by_onnxruntime,) = session.run(["last_hidden_state"], {i.name: feeds[i.name] for i in session.get_inputs()})
    np.testing.assert_allclose(by_onnxruntime, exact, rtol=0, atol=5e-5 * np.abs(exact).max())
    assert any("MatMulNBits" in node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_bits_of_a_weight_of_4_bit_floats(form: str, tmp_path: Path) -> None:
    """Of matrices of whole chunks; each row of nvfp4 has the scale of its matrix, too."""
    block = weft.Block(weft.Attention(4), weft.GatedMLP(512), weft.RMSNorm())
    graph = run_passes(in_memory(weft.Decoder(VOCAB, 256, 1, block).graph()), f"quantize{{format={form}}}")
    state = weft.torch(graph).state_dict()
    for name, rows, width in (("layers.0.attn.q", 256, 256), ("layers.0.ffn.down", 256, 512)):
        parts = [tensor for key, tensor in state.items() if key.startswith(f"{name}.")]
        bits = 8 * sum(tensor.nbytes for tensor in parts) / (rows * width)
        assert bits == (4.25 if form == "mxfp4" else 4.5 + 32 / width)


def test_model_folders_hold_codes_not_numbers(tmp_path: Path) -> None:
    graph = in_memory(MODELS["tied"].graph())
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(0, USED, (24, 32)))
    model = Model(graph, "tied", "tied")
    from weft.frontends.app.api.rewrite import rewrite
    from weft.frontends.formats.weft.model_folder import write_model

    fitted = f"quantize{{calibration={tmp_path / 'ids.npy'}}}"
    small = ("quantize{format=mxfp4}", "quantize{format=nvfp4}")
    for i, pipeline in enumerate(("quantize{method=rtn}", fitted, "quantize{format=fp8}", *small)):
        quantized = rewrite(model, pipeline)
        write_model(quantized, tmp_path / str(i))
        again = load_source(str(tmp_path / str(i)))
        ids = list(range(12))
        np.testing.assert_array_equal(_logits(again.graph, ids), _logits(quantized.graph, ids))
        made = Float8 if "fp8" in pipeline else Float4 if pipeline in small else Dequantize
        assert isinstance(again.graph.params["layers.0.ffn.up.weight"].recipe, made)
        if made is Float8:
            continue  # groups of 128 are longer than these rows
        size = (tmp_path / str(i) / "model.safetensors").stat().st_size
        elements = sum(np.prod(p.type.concrete({})) for p in graph.params.values() if p.type.rank == 2)
        assert size < 0.4 * 4 * elements


@pytest.mark.parametrize(
    ("weights", "pipeline"),
    [
        ("int8", "quantize{bits=8}"),
        ("int4", "quantize{bits=4}"),
        ("fp8", "quantize{format=fp8}"),
        ("fp8{keep=down}", "quantize{format=fp8, keep=down}"),
        ("mxfp4", "quantize{format=mxfp4}"),
        ("nvfp4{keep=down}", "quantize{format=nvfp4, keep=down}"),
        ("int4{method=rtn, group=64}", "quantize{bits=4, method=rtn, group=64}"),
        ("int4{method=kquant}", "quantize{bits=4, method=kquant}"),
        (
            "int3{calibration=a.npy}",
            "fold-norm-scale, rotate-residual, rotate-heads, quantize{bits=3, calibration=a.npy}",
        ),
    ],
)
def test_the_pipelines_that_words_stand_for(weights: str, pipeline: str) -> None:
    assert expand_weights(in_memory(MODELS["tied"].graph()), weights) == pipeline


METHODS = [("gptq", True), ("best", True), ("fast", False), ("kquant", False), ("hqq", False), ("rtn", False)]


@pytest.mark.parametrize(("method", "rotates"), METHODS)
def test_weights_are_rotated_for_a_text_alone(method: str, rotates: bool) -> None:
    graph = in_memory(MODELS["tied"].graph())
    graph.tokenize = lambda text: [1] * 999
    assert ("rotate" in expand_weights(graph, f"int4{{method={method}}}")) is rotates


def test_channels_are_scaled_for_8_bits_if_a_text_is_available() -> None:
    graph = in_memory(MODELS["tied"].graph())
    graph.tokenize = lambda texts: [[1] * 999 for _ in texts]
    assert expand_weights(graph, "int8{group=64}") == ("scale-channels{bits=8, group=64}, quantize{bits=8, group=64}")
    assert expand_weights(graph, "int8{method=rtn}") == "quantize{bits=8, method=rtn}"
    cached = run_passes(graph, "kv-cache")
    cached.tokenize = graph.tokenize
    assert expand_weights(cached, "int8") == "quantize{bits=8}"
    graph.tokenize = lambda texts: [[10**6] * 999 for _ in texts]  # of another vocabulary
    assert expand_weights(graph, "int8") == "quantize{bits=8}"


def test_a_graph_that_cannot_be_rotated_goes_without() -> None:
    graph = in_memory(MODELS["biased"].graph())  # LayerNorms
    assert expand_weights(graph, "int4{calibration=a.npy}") == "rotate-heads, quantize{bits=4, calibration=a.npy}"


def test_interrupted_compilation_continues(
    llamas: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it had fitted, of which nothing is left when the folder is written."""
    args = ("compile", llamas[0], "--weights", "int4{tokens=256}", "-o", tmp_path / "out")
    original, fitted = quantizing.quantize_gptq, []

    def stop(*inputs: Any) -> Any:
        fitted.append(inputs)
        if len(fitted) == 6:
            raise KeyboardInterrupt
        return original(*inputs)

    monkeypatch.setattr(quantizing, "quantize_gptq", stop)
    assert weft_command(*args).exit_code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    result = done(*args)
    assert "continues with results of an interrupted run, in" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "partial" not in (tmp_path / "out/weft.json").read_text()
    first = len(fitted)
    done(*args)
    assert len(fitted) - first > first - 6  # all matrices again


@pytest.mark.parametrize("weights", ["int5", "q4_0", "int4{", "4", "", "fp4"])
def test_unknown_words_are_refused(weights: str) -> None:
    with pytest.raises(WeftError, match="is not known; it takes int2, int3, int4, int8, fp8, mxfp4, nvfp4"):
        expand_weights(in_memory(MODELS["tied"].graph()), weights)


def test_weights_option_lists_its_values(tmp_path: Path) -> None:
    line = refused("compile", "gpt2", "--weights", "int5", "-o", tmp_path / "out")
    assert "--weights 'int5' is not known; it takes int2, int3, int4, int8, fp8, mxfp4, nvfp4" in line
    assert not (tmp_path / "out").exists()
    (tmp_path / "tiny.py").write_text(ARCHITECTURE)
    done("compile", tmp_path / "tiny.py", "--weights", "int4", "-o", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "weft.json").read_text())["blocks"] == {"uint4_32": 5, "int8_32": 1}
    assert "activations rounded to int8" in done("verify", tmp_path / "out", "--trust", "--tokens", 4).stdout
    done("compile", tmp_path / "tiny.py", "--weights", "int4", "--arithmetic", "f32", "-o", tmp_path / "exact")
    found = verify_folder(tmp_path / "exact", trust=True, tokens=4)
    assert found.passed and found.tolerance < 1e-4
