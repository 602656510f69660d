"""Work of operations: bytes equal the costs of the ops, and a decode step costs as much as a graph with a cache."""

from __future__ import annotations

import pytest

from weft import Attention, Block, Decoder, GatedMLP, LinearAttention, Mamba, RMSNorm, RoPE, load_source
from weft.backends.viz.model.network import build_network
from weft.backends.viz.model.outline import build_outline
from weft.backends.viz.model.part_costs import sum_costs
from weft.backends.viz.model.work import DEVICES, NONE, Device, compute_work, list_devices
from weft.ir import Graph, ops
from weft.ir.graph.analysis import sum_node_costs
from weft.ir.types import sizes
from weft.passes import run_passes

from ..pages import model_of, network_of

LENGTH = 300


def bind_sizes(tokens: int, past: int = 0) -> dict[str, int]:
    whole = tokens + past
    return {"batch": 1, "seq": tokens, "past": past, "total": whole, "capacity": whole, "source": whole}


def sum_op_costs(graph: Graph, tokens: int, past: int = 0) -> dict[str, int]:
    """Count work by the costs of the ops, in the graph's own dtypes."""
    found, at = sum_node_costs(graph.nodes), bind_sizes(tokens, past)
    return {name: sizes.evaluate(getattr(found, name), at) for name in ("flops", "read", "written")}


@pytest.mark.parametrize("preset", ["smollm2-135m", "mixtral-8x7b", "t5-base", "mamba-130m", "bert-base"])
def test_prefill_work_equals_op_costs(preset: str) -> None:
    graph = model_of(preset).graph
    whole = sum_costs(build_outline(build_network(graph))).work
    assert whole.evaluate(bind_sizes(70), 4) == sum_op_costs(graph, 70)


def build_windowed_graph() -> Graph:
    local = Block(Attention(4, 2, rope=RoPE(), window=16), GatedMLP(48), RMSNorm())
    mixed = [local, Block(LinearAttention(4), GatedMLP(48)), Block(Mamba(48, state=5, conv=4))]
    graph: Graph = load_source(Decoder(50, 32, mixed, context=512)).graph
    return graph


@pytest.mark.parametrize("preset", ["smollm2-135m", "mixtral-8x7b", "deepseek-v3", "mamba-130m", ""])
def test_decode_step_work_equals_the_cost_of_a_cached_graph(preset: str) -> None:
    """A cached graph reads a mask too: a number of 8 bytes for every token and attention, and for nothing else.

    What is made of weights alone is folded first: it is computed once for the model, for no token.
    """
    graph = run_passes(model_of(preset).graph if preset else build_windowed_graph(), "fold-constants")
    found = sum_costs(build_outline(build_network(graph))).step.evaluate(bind_sizes(LENGTH), 4)
    cached = run_passes(graph, "kv-cache")
    run = sum_op_costs(cached, 1, LENGTH - 1)
    assert found["flops"] == run["flops"] and found["written"] == run["written"]
    masks = [n for n in cached.nodes if "key_mask" in {o.name for o in n.op.operands} and n.operand("key_mask")]
    beyond = 0  # the cached graph reads the whole cache; a window keeps as much as it sees
    for node in cached.nodes:
        if node.op is ops.attention and node.attrs["window"] is not None:
            k, v = node.operand("k"), node.operand("v")
            beyond += 4 * (LENGTH - node.attrs["window"]) * (k.width + v.width if k and v else 0)
    assert run["read"] - found["read"] == 8 * LENGTH * len(masks) + beyond


def test_encoder_has_no_decode_step_work() -> None:
    parts = {p.path: sum_costs(p) for p in build_outline(network_of("t5-base")).parts()}
    encoder = [f for path, f in parts.items() if path.startswith("encoder.") and f.parameters]
    assert encoder and all(f.step == NONE and f.work != NONE for f in encoder)


def test_mixture_reads_only_the_experts_that_tokens_use() -> None:
    graph = model_of("mixtral-8x7b").graph
    moe = next(n for n in graph.nodes if n.op is ops.moe)
    each = 3 * 4096 * 14_336
    numbers = [sizes.evaluate(compute_work(moe).read, bind_sizes(n)) for n in (1, 4)]
    assert numbers == [2 * each + 4096 + 8, 8 * each + 4 * (4096 + 8)]


BY_NAME = {device.name: device for device in DEVICES}


def test_rate_depends_on_the_dtype() -> None:
    device = Device("toy", half=8.0, single=2.0, memory=1.0)
    assert [device.rate(dtype) for dtype in ("f16", "bf16", "f32")] == [8.0, 8.0, 2.0]


def test_ridge_points_are_those_of_the_data_sheets() -> None:
    """FLOPs per byte at which a device is bound by both: 989.5 TFLOP/s over 3.35 TB/s, 312 TFLOP/s over 2.039 TB/s."""
    ridge = {name: BY_NAME[name].rate("f16") / BY_NAME[name].memory for name in ("H100", "A100")}
    assert ridge == {"H100": pytest.approx(295.4, abs=0.1), "A100": pytest.approx(153.0, abs=0.1)}


def test_page_data_has_every_device_and_dtype() -> None:
    data = list_devices()
    assert data["tokens"] == 512 and data["dtypes"] == {"f16": 2, "bf16": 2, "f32": 4}
    assert [*data["devices"]] == [*BY_NAME]
    assert data["devices"]["A100"] == {"rates": {"f16": 312e12, "bf16": 312e12, "f32": 19.5e12}, "memory": 2.039e12}
