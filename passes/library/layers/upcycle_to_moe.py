"""Upcycle feed-forwards to mixtures of experts."""

from __future__ import annotations

from weft.ir import Graph, Param, WeftError, ops
from weft.ir.recipes import Concat, Normal, Reshape

from ... import Pass, Trace
from ...analysis.feed_forward import FeedForward, Projection, match_feed_forward
from ...edits.edit import add_common_prefix, backward_slice, derive_param, erase_unused, replace_uses

STD = 0.02  # of a new router's weights
LIMIT = 1024  # number of experts


class UpcycleToMoe(Pass):
    """Replace every feed-forward by a mixture of `experts` copies of it; a new router selects `top_k` for each token.

    Σ_e g_e E(x) = E(x) for any router output if the weights g_e of the selected experts sum to 1, so they are
    renormalized. The model is the same until further training, when the copies diverge. The router's weight is random
    normal, drawn from `seed`.

    Condition: the pass skips a feed-forward whose hidden values have other readers, whose norm is fused into it, or
    that is a shared expert next to routed ones.

    Source: Komatsuzaki 2023 (2212.05055), sparse upcycling.

    Example upcycle-to-moe{experts=4}::

        graph example {
          input %x: f32[batch, seq, 4]
          param %ffn.up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          param %ffn.down.weight: f32[4, 6] = normal([4, 6], std=0.5, stream="down")
          scope ffn
            %.up: f32[batch, seq, 6] = linear(%x, %.up.weight)
            %.act: f32[batch, seq, 6] = relu(%.up)
            %.down: f32[batch, seq, 4] = linear(%.act, %.down.weight)
          output y = %ffn.down
        }
    """

    name = "upcycle-to-moe"
    effect = "exact"
    purpose = "Exchange parts and grow"
    tradeoff = "each token computes top_k times as much, and there are `experts` times the weights"
    experts: int
    top_k: int = 2
    seed: int = 0

    def run(self, graph: Graph, trace: Trace) -> None:
        if not 1 <= self.top_k <= self.experts <= LIMIT:
            raise WeftError(
                f"{self.name}: top_k={self.top_k} and experts={self.experts} must be 1 ≤ top_k ≤ experts ≤ {LIMIT}"
            )
        for node in graph.nodes:
            unit, at = match_feed_forward(node), node.output.name
            if isinstance(unit, str):
                trace.refuse(self.name, at, unit)
            elif unit is not None and unit.up.is_normed:
                trace.refuse(self.name, at, f"its norm is fused into it: run {self.name} before fuse-norm-linear")
            elif unit is not None and _is_shared_expert(unit):
                trace.refuse(self.name, at, "it is a shared expert next to routed ones")
            elif unit is not None:
                trace.record_rewrite(self.name, at)
                self._upcycle_feed_forward(unit)

    def _upcycle_feed_forward(self, f: FeedForward) -> None:
        graph, down = f.down.graph, f.out.params[0]

        def stack_experts(part: Projection | None, name: str, bias: bool = False) -> Param | None:
            param, recipe = (None, None) if part is None else (part.params[bias], part.bias if bias else part.weight)
            if part is None or param is None or recipe is None:
                return None
            shape = (self.experts, part.stop - part.start, *param.shape[1:])
            full = add_common_prefix(f.params, f"experts.{name}_bias" if bias else f"experts.{name}")
            return derive_param(param, Reshape(Concat((recipe,) * self.experts), shape), shape, full)

        shape = (self.experts, f.x.width)
        router_recipe = Normal(shape, STD, f"{down.name} router", self.seed)
        router = derive_param(down, router_recipe, shape, add_common_prefix(f.params, "router.weight"))
        parts = {"up": f.up, "down": f.out, "gate": f.gate}
        with graph.inserting(before=f.down):
            logits = ops.linear(f.x, router, name="router")
            combine = ops.route(logits, k=self.top_k)
            y = ops.moe(
                f.x,
                combine,
                *(stack_experts(part, name) for name, part in parts.items()),
                *(stack_experts(part, name, bias=True) for name, part in parts.items()),
                activation=f.activation,
                limit=f.limit,
                shift=f.shift,
                active=self.top_k,
            )
        replace_uses(f.down.output, y)
        erase_unused(graph, backward_slice([f.down.output], [f.x]))


def _is_shared_expert(f: FeedForward) -> bool:
    """Return whether the output of `f`, with or without factors, is added to the output of a `moe`."""
    values = [f.down.output]
    # `values` grows during the walk: factors between the result and the sum are followed.
    for value in values:
        for node in value.users:
            if node.op in (ops.mul, ops.affine):
                values.append(node.output)
            producers = [v.producer for v in node.inputs if v is not None and v is not value and v.producer is not None]
            if node.op is ops.add and any(o.op is ops.moe for o in producers):
                return True
    return False
