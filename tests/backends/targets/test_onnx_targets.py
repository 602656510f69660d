"""The ONNX targets: passes, forms and files of their models, and the runtime that opens them."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from weft import Attention, Block, CrossAttention, Decoder, Encoder, EncoderDecoder, GatedMLP, RMSNorm, RoPE
from weft.backends import cpu
from weft.backends.folder_facts import FolderFacts
from weft.backends.target import TARGETS
from weft.ir import Graph, parse
from weft.passes import run_passes

CPU, CUDA, ONNX = (TARGETS[name] for name in ("ort-cpu", "ort-cuda", "onnx"))
SIZES: dict[str, Any] = {"vocab": 17, "dim": 16, "layers": 1}
ATTENTION = Attention(2, rope=RoPE(), head_dim=8)


def block(**options: Any) -> Block:
    return Block(Attention(2, head_dim=8, rope=RoPE(), **options), GatedMLP(24), RMSNorm())


def finish(target: Any, graph: Graph, dtype: str, passes: str = "") -> list[str]:
    return [p.name for p in target.pipeline(graph, dtype, passes, max_length=16).passes if p.name not in passes]


@pytest.fixture(scope="module")
def encoder() -> Graph:
    return Encoder(**SIZES, block=block(causal=False), context=16).graph()


@pytest.fixture(scope="module")
def decoder() -> Graph:
    return run_passes(Decoder(**SIZES, block=block(), context=16).graph(), "kv-cache")


@pytest.fixture(scope="module")
def both() -> Graph:
    crossing = Block(ATTENTION, GatedMLP(24), RMSNorm(), cross=CrossAttention(2))
    halves = Encoder(**SIZES, block=block()), Decoder(**SIZES, block=crossing)
    return EncoderDecoder(*halves).graph()


def test_lowerings_are_those_of_the_target() -> None:
    assert CPU.lowerings("moe")[0] == "QMoE" and "GroupedExperts" in ONNX.lowerings("moe")
    assert not {"QMoE", "MoE"} & {*ONNX.lowerings("moe")} and ONNX.lowerings("none of the ops") == []


def test_encoders_in_bf16_return_f32(encoder: Graph) -> None:
    assert finish(CUDA, encoder, "bf16") == ["cast", "widen-outputs"]
    assert finish(CUDA, encoder, "f16") == ["cast"]


def test_codes_of_4_bit_floats_are_widened_on_a_cpu(encoder: Graph) -> None:
    passes = "quantize{bits=4}"
    assert "widen-codes" in finish(ONNX, encoder, "f32", passes)
    assert "widen-codes" not in finish(CUDA, encoder, "f16", passes)
    assert "widen-codes" not in finish(ONNX, encoder, "f32")


def test_losses_of_encoder_decoders_are_dropped() -> None:
    graph = parse("""graph both {
      input %x: f32[batch, seq, 4]
      %loss: f32[] = mean(%x, axes=[0, 1, 2])
      output logits = %x
      output aux_loss = %loss
    }""")
    graph.meta["kind"] = "encoder-decoder"
    assert finish(CPU, graph, "f32") == ["drop-outputs"]
    graph.meta["kind"] = "decoder"
    assert finish(CPU, graph, "f32") == []


def test_encoder_decoders_have_a_model_per_half(both: Graph, decoder: Graph) -> None:
    assert list(CPU.forms(both, CPU.options())) == ["encoder", "decoder"]
    assert CPU.files("encoder-decoder") == ("model.onnx", "encoder.onnx")
    assert CPU.files("decoder") == CPU.files("encoder") == ("model.onnx",)
    assert list(CPU.forms(decoder, CPU.options())) == ["model"]


def test_rolling_caches_have_a_second_model_for_genai() -> None:
    graph = Decoder(**SIZES, block=block(window=4), context=16).graph()
    full, rolling = run_passes(graph, "kv-cache"), run_passes(graph, "kv-cache, rolling-buffer")
    assert list(ONNX.forms(full, ONNX.options())) == ["model"]
    forms = ONNX.forms(rolling, ONNX.options())
    assert list(forms) == ["model", "genai", "genai-model"] and forms["genai-model"].of == "genai"


def test_place_is_the_device_of_the_target() -> None:
    place = CPU.place("auto")
    assert (place.target, place.device) == ("ort-cpu", "cpu")


def test_exact_arithmetic_marks_quantized_weights() -> None:
    options: Any = CPU.options(arithmetic="f32", keep_blocks="head", cache_dtype="int8")
    assert options.passes() == {
        "arithmetic": "keep-blocks{which=quantized}",
        "keep_blocks": "keep-blocks{which=head}",
        "cache_dtype": "quantize-cache{bits=8}",
    }


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which function opens a folder, instead of opening it."""
    calls: list[str] = []
    for name in ("ort.ort_decoder.open_decoder", "ort.ort_decoder.open_encoder", "torch.ort_cuda_decoder.open_decoder"):
        record = partial(lambda name, *_: calls.append(name.partition(".")[2]), name)
        monkeypatch.setattr(f"weft.backends.runtime.{name}", record)
    return calls


@pytest.mark.parametrize(
    ("kind", "device", "cuda", "opens"),
    [
        ("encoder", "cuda", True, "ort_decoder.open_encoder"),
        ("decoder", "cpu", True, "ort_decoder.open_decoder"),
        ("decoder", "auto", False, "ort_decoder.open_decoder"),
        ("decoder", "auto", True, "ort_cuda_decoder.open_decoder"),
    ],
)
def test_decoders_on_cuda_draw_tokens_with_pytorch(
    kind: str, device: str, cuda: bool, opens: str, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.backends.runtime.ort.session.has_cuda_provider", lambda: cuda)
    ONNX.open(FolderFacts(Path("out"), (), kind, "onnx", vocab=9, max_length=8), device, None)
    assert opened == [opens]


@pytest.mark.parametrize("keeps", [False, True])
def test_slow_blocks_are_reported_when_a_folder_is_opened(
    keeps: bool, opened: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "warn_slow_blocks", lambda: "this CPU is slow with blocks")
    facts = FolderFacts(Path("out"), (), "decoder", "ort-cpu", vocab=9, max_length=8, keeps_blocks=keeps)
    with caplog.at_level(logging.WARNING, "weft.runtime"):
        CPU.open(facts, "cpu", None)
    assert ("this CPU is slow with blocks" in caplog.text) == keeps and opened == ["ort_decoder.open_decoder"]
