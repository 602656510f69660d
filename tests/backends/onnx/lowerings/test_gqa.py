"""GroupQueryAttention: what it absorbs, what it computes, and reasons for which another lowering is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import weft
from weft import Attention, Block, Decoder, GatedMLP, RoPE
from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import LOWERINGS, list_refusals
from weft.backends.target import TARGETS
from weft.ir import interpret, ops
from weft.passes import legalize, run_passes

from ..attention_models import HEADS, alibi
from ..attention_models import decoder as attention_decoder
from ..small_decoder import decoder, op_types


def test_gqa_is_used_or_refused_with_a_reason(tmp_path: Path) -> None:
    fits = weft.compile(decoder(), tmp_path / "fits")
    assert fits.trace == []
    assert op_types(tmp_path / "fits").count("GroupQueryAttention") == 2
    assert not {"RotaryEmbedding", "Split"} & set(op_types(tmp_path / "fits"))  # absorbed
    odd = weft.compile(decoder(dim=48), tmp_path / "odd")  # heads of 12
    assert "Attention" in op_types(tmp_path / "odd")
    assert any("GroupQueryAttention refused: head sizes 12 and 12" in line for line in odd.trace)


def test_rope_is_absorbed_only_if_the_kernel_supports_its_size(tmp_path: Path) -> None:
    weft.compile(decoder(dim=32), tmp_path / "small")  # heads of 8: four pairs, not a multiple of eight
    kinds = op_types(tmp_path / "small")
    assert kinds.count("GroupQueryAttention") == 2
    assert kinds.count("RotaryEmbedding") == 4


def test_gqa_on_cuda_refuses_bias_with_sinks() -> None:
    place = TARGETS["ort-cuda"]
    for sinks, wanted in ((None, None), (np.zeros(HEADS), "the CUDA kernel takes a bias or sinks, not both")):
        graph = run_passes(attention_decoder(alibi, sinks=sinks), "kv-cache, cast{dtype=f16}")
        node = next(n for n in graph.nodes if n.op is ops.attention)
        found = next(lowering for lowering in LOWERINGS["attention"] if lowering.name == "GroupQueryAttention")
        assert found.when(node, place) == wanted
        assert list_refusals(node, place) is None  # the standard operator takes both


ROTARY = {
    "half": Attention(4, 2, 16, RoPE(1000.0)),
    "interleaved": Attention(4, 2, 16, RoPE(interleaved=True), window=4, sinks=True),
}


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
def test_gqa_absorbs_rope(target: str, name: str) -> None:
    """GroupQueryAttention rotates queries and keys itself, and computes what the graph means."""
    model = Decoder(29, 24, 2, Block(ROTARY[name], GatedMLP(20)), context=32)
    graph, place = run_passes(model.graph(), "kv-cache"), TARGETS[target]
    lowered = graph.clone()
    legalize(lowered, lambda node: list_refusals(node, place))
    built = build_model(lowered, place, max_length=32)
    rotary = [n.attributes["do_rotary"].value for n in built.model.graph if n.op_type == "GroupQueryAttention"]
    assert rotary == ([1, 1] if target == "ort-cpu" else [])
    kinds = [n.op_type for n in built.model.graph]
    assert kinds.count("RotaryEmbedding") == (0 if target == "ort-cpu" else 4)
    session = ort.InferenceSession(serialize_model(built), providers=["CPUExecutionProvider"])
    rng, length = np.random.default_rng(0), 7
    feeds = {
        "input_ids": rng.integers(0, 29, (2, length)),
        "position_ids": np.tile(np.arange(length), (2, 1)),
        "attention_mask": np.ones((2, length), np.int64),
    }
    past = {n: np.zeros((2, 2, 9, 16), np.float32) for n in graph.inputs if n.startswith("past_key_values.")}
    wanted = interpret(graph, {**feeds, **past})["logits"]
    found = session.run(["logits"], {**feeds, **past})[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-6)
