"""The pipeline of a decode step: exact on every graph, and a node for each kernel."""

from __future__ import annotations

import pytest

from weft.ir import WeftError, ops
from weft.ir.op import OPS, Trait
from weft.passes import run_passes

from ....sampling import each
from ...models import weight
from ...zoo import TRIED, ZOO
from .layers import LAYERS, stream


@pytest.mark.halved
@pytest.mark.parametrize("name", each(6, TRIED))
def test_decode_pipeline_is_exact_on_every_graph(name: str) -> None:
    """In float64, pass by pass; what is fused can be told from what it was made of, and done only once."""
    after = run_passes(ZOO[name](), "decode-torch", verify=True)
    again = run_passes(after, FUSED)
    assert again == after


FUSED = "fuse-norm-linear{fold=false}, fuse-activation, fuse-qkv, fuse-latent, fuse-linear-residual, pack-linears"


def launches(name: str) -> list[str]:
    graph = run_passes(ZOO[name](), "decode-torch")
    return [n.op.name for n in graph.nodes if n.scope.startswith("layers.0") and n.op is not ops.pack]


@pytest.mark.parametrize("name", LAYERS)
def test_layer_has_one_node_per_kernel(name: str) -> None:
    assert launches(name) == LAYERS[name].split()


def test_caches_come_after_fusing() -> None:
    """The states of recurrences go through fused ops; prefill and steps equal one pass over the text."""
    for name in ("variant/grouped", "family/mamba", "variant/Mamba-2", "variant/delta rule"):
        step = run_passes(ZOO[name](), "decode-torch")
        graph = run_passes(step, "kv-cache", verify=True)
        assert [o for o in graph.outputs if o.startswith("present")]


def test_every_fused_op_is_made_by_a_pass() -> None:
    graphs = [*(run_passes(ZOO[name](), "decode-torch") for name in MODELS)]
    graphs.append(run_passes(ZOO["variant/experts"](), "fuse-mixture"))  # whose choice the router is fused with later
    made = {n.op for graph in graphs for n in graph.nodes}
    assert {op for op in OPS.values() if Trait.FUSED in op.traits} <= made


MODELS = [*LAYERS, "variant/latent", "variant/delta rule", "variant/depths by rank"]


def test_norm_linear_without_norm_counts_as_fused() -> None:
    """A linear map as norm_linear of the kind none is not taken for a norm by passes that know norm_linear."""
    graph, (x,) = stream("x")
    graph.add_output("y", ops.linear(x, weight(graph, "a", 6, 6)))
    with pytest.raises(WeftError, match=r"pass rotate-residual does not support fused ops, such as norm_linear"):
        run_passes(graph, "fuse-norm-linear{fold=false}, rotate-residual")


def test_passes_without_support_refuse_fused_ops() -> None:
    with pytest.raises(WeftError, match=r"pass mha-to-gqa does not support fused ops, such as embed_tokens \(%embed\)"):
        run_passes(ZOO["variant/grouped"](), "decode-torch, mha-to-gqa{kv_heads=1}")
