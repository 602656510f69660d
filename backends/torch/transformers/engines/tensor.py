"""Units of tensor parallelism: the linear maps of an attention or feed-forward, which are divided together.

Heads and hidden units are divided: linear maps into them by columns, linear maps out of them by rows, so that the
results are summed once after an attention and once after a feed-forward (Shoeybi 2019, arXiv 1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import Trait
from weft.passes.analysis.feed_forward import match_feed_forward
from weft.passes.analysis.projections import Branch, Projections, find_branch, find_projections

from ...program.statements import Program, Submodule

COLUMNS, ROWS = "colwise", "rowwise"
HEADS = "replicated_with_grad_allreduce"  # style of a norm whose weights are the same for every head
PER_HEAD = ("bias", "sinks", "past_k")  # operands of an attention that differ by head


@dataclass
class Units:
    """The units of a model. A unit is the modules of one attention or feed-forward: all or none of them are divided.

    styles: unit path → {module path: style}, for divided units. undivided: unit path → the reason, for the others. A
    path is the scope of the unit; for a divided feed-forward, that of its output linear.
    """

    styles: dict[str, dict[str, str]] = field(default_factory=dict)
    undivided: dict[str, str] = field(default_factory=dict)


def find_tensor_units(graph: Graph, program: Program) -> Units:
    """Return the units of the attentions and feed-forwards of `graph`, which was lowered to `program`."""
    leaves, units = _ModuleIndex(program), Units()
    for node in graph.nodes:
        name = node.scope or node.output.name
        if node.op is ops.attention:
            styles = _divide_attention(leaves, node)
        elif node.op is ops.linear:
            name, styles = _divide_feed_forward(leaves, node) or (name, {})
        else:
            continue
        if isinstance(styles, str):
            units.undivided[name] = styles
        elif styles:
            units.styles.setdefault(name, {}).update(styles)
    return units


class _ModuleIndex:
    """An index of the modules of a program by the parameter that is their weight."""

    def __init__(self, program: Program) -> None:
        names = {key: param.name for key, param in program.weights.items()}
        leaves = {o.path: o for s in program.statements for o in s.operands if isinstance(o, Submodule)}
        self._of = {names[f"{path}.weight"]: leaf for path, leaf in leaves.items() if f"{path}.weight" in names}

    def path(self, param: Value | None, kind: str = "nn.Linear") -> str | None:
        """Return the path of the module with weight `param`, if its source begins with `kind`; else None."""
        leaf = self._of.get(param.name) if isinstance(param, Param) else None
        return leaf.path if leaf is not None and leaf.init.startswith(kind) else None


def _divide_attention(leaves: _ModuleIndex, node: Node) -> dict[str, str] | str:
    """Return {module path: style} of an attention's linear maps and head norms; the reason (str) if it is undivided."""
    gate, out = _find_gate(node)
    around = find_projections(node) if gate is None else _find_gated_projections(node, out)
    if isinstance(around, str):
        return around
    if around.v is None:
        return "its keys are also its values"
    for name in PER_HEAD:
        if node.operand(name) is not None:
            return f"it has {name} of its own for every head"
    styles: dict[str, str] = {}
    for branch in around.branches:
        path = leaves.path(branch.weight)
        if branch.is_packed or path is None:
            return "its projections are not modules of their own"
        styles[path] = COLUMNS
        norms = _divide_norms(leaves, around, branch)
        if isinstance(norms, str):
            return norms
        styles |= norms
    if gate is not None:
        path = leaves.path(gate.operand("weight"))
        if path is None:
            return "its gate is not a module of its own"
        styles[path] = COLUMNS
    path = leaves.path(around.o.operand("weight"))
    if path is None or path in styles:
        return "its output projection is not a module of its own"
    return styles | {path: ROWS}


def _find_gate(node: Node) -> tuple[Node | None, Node]:
    """Return (linear map of the gate, output projection) of the attention `node`; (None, `node`) without a gate. A
    gated attention's output is multiplied, elementwise, by the activated result of the gate's linear map."""
    mul = _get_reader(node)
    out = mul and _get_reader(mul)
    if mul is None or out is None or (mul.op, out.op, out.inputs[0]) != (ops.mul, ops.linear, mul.output):
        return None, node
    gate = next((v for v in mul.inputs if v is not node.output), None)
    acting = None if gate is None else gate.producer
    if gate is None or acting is None or gate.shape != node.output.shape or Trait.ELEMENTWISE not in acting.op.traits:
        return None, node
    x = acting.inputs[0]
    linear = None if x is None or len(acting.inputs) != 1 else x.producer
    if linear is None or linear.op is not ops.linear or _get_reader(acting) is None or _get_reader(linear) is None:
        return None, node
    return linear, out


def _find_gated_projections(node: Node, out: Node) -> Projections | str:
    """Return the projections of attention `node` with output projection `out`, or a reason (str)."""
    branches = {role: find_branch(node, role) for role in "qkv" if node.operand(role) is not None}
    for branch in branches.values():
        if isinstance(branch, str):
            return branch
    q, k, v = (branches.get(role) for role in "qkv")
    assert isinstance(q, Branch) and isinstance(k, Branch) and not isinstance(v, str)
    return Projections(node, q, k, v, out)


def _get_reader(node: Node) -> Node | None:
    """Return the only reader of the output of `node`; None without or with several readers, or for a graph output."""
    readers = [reader for reader, _ in node.output.uses]
    return readers[0] if len(readers) == 1 and not node.output.is_output else None


def _divide_norms(leaves: _ModuleIndex, around: Projections, branch: Branch) -> dict[str, str] | str:
    """Return {module path: style} of the norms of each head between the projection of `branch` (q, k or v) and the
    scores; a reason (str) if nodes between them cannot be divided by heads."""
    styles = {}
    for node in branch.between:
        weights = [v for v in node.inputs[1:] if isinstance(v, Param)]
        if node.op in (ops.rms_norm, ops.layer_norm):
            width = node.inputs[0].width if node.inputs[0] is not None else 0
            path = leaves.path(node.operand("weight"), "nn.")
            if width != around.head_dim or (weights and path is None):
                return "its queries and keys are normed across heads"
            if path is not None:
                styles[path] = HEADS
        elif weights and node.op is not ops.rope:
            return f"{node.op.name} has weights between a projection and the scores"
    return styles


def _divide_feed_forward(leaves: _ModuleIndex, node: Node) -> tuple[str, dict[str, str] | str] | None:
    """Return (path, {module path: style}, or the reason (str) why it is undivided) of the feed-forward whose output
    linear is `node`; None if `match_feed_forward` finds none."""
    unit = match_feed_forward(node)
    if unit is None or isinstance(unit, str):
        return None
    ins = [leaves.path(p.params[0]) for p in unit.parts[:-1]]
    out = leaves.path(unit.out.params[0])
    if out is None or any(p.is_packed or p.is_normed for p in unit.parts) or None in ins:
        return node.scope or node.output.name, "its linears are not modules of their own"
    return out, {path: COLUMNS for path in ins if path is not None} | {out: ROWS}
