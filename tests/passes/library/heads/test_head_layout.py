"""gqa-to-mha, permute-heads and pad-head-dim together, compiled for ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.ir import interpret
from weft.passes import legalize, run_passes
from weft.passes.core.equivalence import EXACT

from ...models import worst


def test_head_passes_combine_in_any_order_and_compile() -> None:
    """All three, then the usual pipeline: ONNX Runtime computes what the model did."""
    mixer = Attention(4, 2, 12, RoPE(), qk_norm=RMSNorm(), qkv_bias=True)
    before = Decoder(29, 24, 2, Block(mixer, GatedMLP(20)), context=32).graph()
    changes = ["permute-heads{order=[2, 3, 1, 0]}", "gqa-to-mha", "pad-head-dim{multiple=16}"]
    for pipeline in (changes, changes[::-1], ["pack-qkv", *changes], [changes[0], "pack-qkv", *changes[1:]]):
        after = run_passes(before, ", ".join(pipeline), verify=True)
        assert worst(before, after) <= EXACT
    after = run_passes(after, "default, -last-token-logits", verify=True)
    place = TARGETS["ort-cpu"]
    legalize(after, lambda node: list_refusals(node, place))
    built = build_model(after, place, max_length=32)
    assert [n.attributes["do_rotary"].value for n in built.model.graph if n.op_type == "GroupQueryAttention"] == [0, 0]
    session = ort.InferenceSession(serialize_model(built), providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(0, 29, (2, 6))
    at, mask = np.tile(np.arange(6), (2, 1)), np.ones((2, 6), np.int64)
    past = {i.name: np.zeros((2, 4, 9, 16), np.float32) for i in session.get_inputs() if "past" in i.name}
    feeds = {"input_ids": ids, "position_ids": at, "attention_mask": mask, **past}
    wanted = interpret(before, {"input_ids": ids, "position_ids": at})["logits"]
    np.testing.assert_allclose(session.run(["logits"], feeds)[0], wanted, rtol=0, atol=3e-6)
