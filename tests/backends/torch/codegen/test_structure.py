"""Modules and loops: the statements of a scope become a method, and equal methods share a class."""

from __future__ import annotations

import numpy as np
import torch

from weft import MLP, Attention, Block, Decoder, RMSNorm
from weft.backends.torch.codegen.model_source import write_source
from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.recipes import Literal
from weft.ir.types import TensorType

from ....lowered import build_module, lower
from ..generated import graph_of
from ..small_graphs import F32, check, small_graph, weight


def test_layers_of_a_post_norm_decoder_share_a_class() -> None:
    """Check that the last token is selected after the layers, not inside one."""
    text = write_source(lower(graph_of("family/bart"))).text
    assert "nn.ModuleList(DecoderBlock() for _ in range(3))" in text


ROWS = np.array([[1.5, -2.0, 0.25, 3.0], [0.5, 4.0, -1.0, 2.0]])


def test_layers_with_a_table_and_with_a_weight_have_two_classes() -> None:
    """Tables stay in f32 when weights are cast; weights do not."""

    def make(x: Value) -> Value:
        table = x.graph.add_param("layers.0.scale.t", TensorType(F32, (4,)), Literal((1.1, 2.2, 3.3, 4.4), (4,)))
        for i, scale in enumerate((table, weight(x.graph, "layers.1.scale.t", 4))):
            with x.graph.scope(f"layers.{i}"), x.graph.scope("scale"):
                x = ops.mul(x, scale)
        return x

    module = build_module(small_graph(make), dtype=torch.bfloat16)
    kinds = {name: t.dtype for name, t in module.state_dict().items()}
    assert kinds == {"layers.0.scale.t": torch.float32, "layers.1.scale.t": torch.bfloat16}
    assert [name for name, _ in module.named_parameters()] == ["layers.1.scale.t"]


def test_numbered_weights_are_entries_of_lists() -> None:
    def make(x: Value) -> Value:
        for i in range(2):
            x = ops.linear(x, weight(x.graph, f"maps.{i}", 4, 4))
        return x

    graph = small_graph(make)
    check(graph, ROWS)
    assert [*build_module(graph).state_dict()] == ["maps.0", "maps.1"]


def test_constant_sinks_of_one_layer_are_a_buffer() -> None:
    """Check that a constant table is not trained, although the statements of the layers are equal."""
    graph = Decoder(61, 24, 2, Block(Attention(3, sinks=True), MLP(32), RMSNorm())).graph()
    graph.params["layers.1.attn.sinks"].recipe = Literal((0.5, 1.0, 2.0), (3,))
    module = build_module(graph)
    assert [name for name, _ in module.named_buffers()] == ["layers.1.attn.sinks"]
    assert "layers.0.attn.sinks" in dict(module.named_parameters())
