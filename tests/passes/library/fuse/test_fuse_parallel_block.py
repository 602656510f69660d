"""fuse-parallel-block: attention and feed-forward of one norm take two products."""

from __future__ import annotations

import pytest

from weft.frontends.dsl import MLP, Attention, Block, Decoder, GatedMLP, LayerNorm, Repeat, RMSNorm, RoPE
from weft.ir import ops
from weft.ir.recipes import Normal
from weft.passes import Trace, run_passes
from weft.passes.analysis.costs import compute_cost
from weft.passes.core.equivalence import EXACT

from ...models import applied, count, worst
from ...rewrites import Rewrite, rewrites
from ...zoo import ZOO

PARALLEL = [
    "family/phi",
    "family/falcon-mqa",
    "family/gptj",
    "family/cohere",
    "variant/parallel",
]


@pytest.mark.parametrize("case", rewrites(__file__), ids=str)
def test_rewrites(case: Rewrite) -> None:
    case.check()


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_blocks_become_two_products(name: str) -> None:
    before = ZOO[name]()
    after = applied("fuse-parallel-block", before)
    layers = count(before, "attention")
    assert count(after, "linear") == 2 * layers + 1 and count(after, "split") == layers
    assert worst(before, after) <= EXACT and compute_cost(after).flops <= compute_cost(before).flops


@pytest.mark.parametrize("first", ["pack-qkv, pack-gate-up, ", "fuse-residual-norm, ", "default, -last-token-logits, "])
@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm()])
def test_after_packing_fusing_and_caches(first: str, norm: RMSNorm | LayerNorm) -> None:
    attention = Attention(4, 2, rope=RoPE(), qkv_bias=True)
    model = Decoder(37, 16, 2, Block(attention, GatedMLP(9), norm, "parallel"))
    after = run_passes(model.graph(), f"{first}fuse-parallel-block", verify=True)
    assert count(after, "linear") == 5


def test_two_norms_fuse_outputs_and_equal_norms_also_inputs() -> None:
    before, trace = Decoder(37, 16, 2, Block(Attention(4), MLP(9), arrangement="parallel_norms")).graph(), Trace()
    after = applied("fuse-parallel-block", before, trace)
    assert count(after, "linear") == 2 * 5 + 1 and worst(before, after) <= EXACT
    assert "different values: only the output linears are fused" in trace.refusals[0].reason
    folded = run_passes(before, "fold-norm-scale, cse, fuse-parallel-block", verify=True)
    assert count(folded, "linear") == 2 * 2 + 1
    wrong = before.clone()  # as if one norm did for both
    for i in range(2):
        norms = {n.output.name: n.output for n in wrong.nodes if n.op is ops.rms_norm}
        norms[f"layers.{i}.ffn_norm"].replace_uses(norms[f"layers.{i}.attn_norm"])
    for p in (*before.params.values(), *wrong.params.values()):
        if p.name.endswith("norm.weight"):
            p.recipe = Normal((16,), 0.3, p.name, mean=1.0)
    assert worst(before, wrong) > 0.05


def test_repeated_layers_share_fused_weights() -> None:
    block = Block(Attention(4), GatedMLP(9), arrangement="parallel")
    before = Decoder(37, 16, 1, Repeat(block, 2)).graph()
    after = applied("fuse-parallel-block", before)
    assert (
        len([n for n in after.params if n.endswith(("in.weight", "out.weight"))]) == 2 and worst(before, after) <= EXACT
    )


def test_sequential_blocks_are_not_fused() -> None:
    """The feed-forward reads what attention added: adding both at once would be another model."""
    before = Decoder(37, 16, 2, Block(Attention(4), MLP(9))).graph()
    assert str(applied("fuse-parallel-block", before)) == str(before)
    parallel = Decoder(37, 16, 2, Block(Attention(4), MLP(9), arrangement="parallel_norms")).graph()
    assert list(parallel.params) == list(before.params)
    assert worst(before, parallel) > 0.05
    scaled = Decoder(37, 16, 1, Block(Attention(4), MLP(9), arrangement="parallel", residual_scale=0.3)).graph()
    assert str(applied("fuse-parallel-block", scaled)) == str(scaled)
    after = applied("fold-scale, fuse-parallel-block", scaled)
    assert count(after, "linear") == 3 and worst(scaled, after) <= EXACT
