"""legalize expands bodies until everything is accepted, or tells every refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.ir import Graph, Node, TensorType, WeftError, ops, verify
from weft.ir.types import dtypes
from weft.passes import Trace, legalize
from weft.passes.core.equivalence import EXACT

from ..models import Tiny, applied, worst

FUSED = "pack-qkv, pack-gate-up, fuse-residual-norm"


def refusing(*names: str) -> Callable[[Node], list[str] | None]:
    return lambda node: [f"{node.op.name} is not spoken here", "nor there"] if node.op.name in names else None


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("add_norm",),
        ("add_norm", "rms_norm", "glu", "swish"),
        ("add_norm", "layer_norm", "rms_norm", "rope", "linear"),
    ],
)
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_refused_ops_are_expanded_all_the_way(names: tuple[str, ...], norm: str) -> None:
    before = applied(FUSED, Tiny(norm=norm, bias="q gate").graph())
    after, trace = before.clone(), Trace()
    legalize(after, refusing(*names), trace)
    verify(after)
    assert not {n.op.name for n in after.nodes} & set(names)
    assert worst(before, after) <= EXACT
    assert (after == before) == (not names) and bool(trace.rewrites) == bool(names)


def test_names_scopes_and_trace() -> None:
    after = applied(FUSED, Tiny(layers=1).graph())
    trace = Trace()
    legalize(after, refusing("add_norm", "glu"), trace)
    made = {v.name: n for n in after.nodes for v in n.outputs}
    assert made["layers.0.mlp_norm"].op is ops.rms_norm and made["layers.0.attn_sum"].op is ops.add
    assert made["layers.0.mlp.glu"].op is ops.mul and made["layers.0.mlp.glu"].scope == "layers.0.mlp"
    assert trace.rewrites == {"expand add_norm": 2, "expand glu": 1}
    assert "expanded glu at %layers.0.mlp.glu: glu is not spoken here; nor there" in trace.lines


def test_an_op_without_a_body_is_named_with_every_refusal() -> None:
    g = Graph("g")
    x = g.add_input("x", TensorType(dtypes.f32, (2, 3)))
    g.add_output("y", ops.add_norm(x, x).normed)
    message = "op rsqrt, in the body of rms_norm in add_norm, at %rsqrt cannot be lowered and has no simpler form: "
    with pytest.raises(WeftError, match=message + "rsqrt is not spoken here; nor there"):
        legalize(g, refusing("add_norm", "rms_norm", "rsqrt"))
    g = Graph("g")
    g.add_output("y", ops.exp(g.add_input("x", TensorType(dtypes.f32, (2,)))))
    with pytest.raises(WeftError, match="op exp at %exp cannot be lowered and has no simpler form: no lowering"):
        legalize(g, lambda node: [])
