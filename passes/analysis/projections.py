"""The linears around an attention: the projections of q, k and v, and the output projection.

`find_projections` finds them, also as pieces of a packed linear; `unpack_branch` splits a packed linear.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import Node, Param, Recipe, TensorReader, Value, WeftError, ops
from weft.ir.op import Trait
from weft.ir.recipes import Concat, Full, Slice, Take

from ..edits.edit import are_params, derive_param, erase_unused, is_feature_split, replace_uses, require_param

TOKENWISE_TRAITS = {Trait.ELEMENTWISE, Trait.ROWWISE, Trait.VIEW}  # ops that treat the first operand token by token


@dataclass(frozen=True)
class Branch:
    """The path from a linear to an operand of an attention.

    linear: the node that computes `start`. If it is packed, its weight also has the rows of other operands.
    start: the output of `linear`; if it is packed, one output of the split after it.
    between: the nodes after `start`, first to last, such as norms per head, rotations and reshapes.
    """

    linear: Node
    start: Value
    between: tuple[Node, ...]

    @property
    def is_packed(self) -> bool:
        return self.start.producer is not self.linear

    @property
    def span(self) -> tuple[int, int]:
        """The range (first, end) of rows of the linear's weight that compute `start`; end is exclusive."""
        pieces = self.start.producer.outputs if self.is_packed and self.start.producer else (self.start,)
        first = sum(piece.width for piece in pieces[: self.start.index])
        return first, first + self.start.width

    @property
    def weight(self) -> Param:
        """The weight [out, in] of the linear, with all rows, also those outside `span`."""
        return require_param(self.linear, "weight")

    @property
    def bias(self) -> Param | None:
        bias = self.linear.operand("bias")
        return bias if isinstance(bias, Param) else None

    @property
    def rope(self) -> Node | None:
        """The first rope in `between`, or None."""
        return next((n for n in self.between if n.op is ops.rope), None)

    @property
    def norm(self) -> Node | None:
        """The first rms_norm or layer_norm in `between`, or None."""
        return next((n for n in self.between if n.op in (ops.rms_norm, ops.layer_norm)), None)

    @property
    def has_plain_path(self) -> bool:
        """Return whether all nodes of `between` are ropes or reshapes, which are linear in each head's features."""
        return all(n.op in (ops.rope, ops.reshape) for n in self.between)


@dataclass(frozen=True)
class Projections:
    """The attention `node`, the branches that compute its q, k and v, and its output projection `o`.

    `v` is None for an attention without an operand v (latent attention, whose keys contain the values).
    """

    node: Node
    q: Branch
    k: Branch
    v: Branch | None
    o: Node

    @property
    def heads(self) -> int:
        return int(self.node.attrs["heads"])

    @property
    def kv_heads(self) -> int:
        return int(self.node.attrs["kv_heads"])

    @property
    def head_dim(self) -> int:
        return self.q.start.width // self.heads

    @property
    def branches(self) -> tuple[Branch, ...]:
        return (self.q, self.k) if self.v is None else (self.q, self.k, self.v)


def find_projections(node: Node) -> Projections | str:
    """Return the linears around the attention `node`; a reason (str) if `find_branch` or `find_output_linear` fails."""
    branches: dict[str, Branch | None] = {"v": None}
    for role in "qkv":
        if node.operand(role) is None:
            continue
        branch = find_branch(node, role)
        if isinstance(branch, str):
            return branch
        branches[role] = branch
    o = find_output_linear(node)
    if isinstance(o, str):
        return o
    q, k = branches["q"], branches["k"]
    assert q is not None and k is not None
    return Projections(node, q, k, branches["v"], o)


def find_output_linear(node: Node) -> Node | str:
    """Return the only reader of attention `node`, if it is a linear whose operands are parameters; else a reason."""
    readers = [n for n, i in node.output.uses if not (n.op is ops.linear and i == 0)]
    linears = [n for n, _ in node.output.uses if n not in readers]
    if readers or node.output.is_output or len(linears) != 1:
        reader = readers[0].op.name if readers else "the graph's output" if node.output.is_output else "several linears"
        return f"the result is read by {reader}, not by one linear"
    (o,) = linears
    if not are_params(o.inputs[1:]):
        return f"the weight of the linear after it (%{o.output.name}) is computed"
    return o


def find_branch(node: Node, role: str) -> Branch | str:
    """Return the path from a linear to operand `role` (q, k or v) of the attention `node`; a reason (str) without one.

    Nodes on the path treat tokens independently, and no other nodes read the values between them. Weight and bias of
    the linear are parameters. An attention with a quantized cache has no path to k and v.
    """
    value = node.required_operand(role)
    if role in "kv" and node.attrs.get("cache_bits") is not None:
        return f"{role} (%{value.name}) is rounded to codes with scales of its own; run quantize-cache later"
    branch = _trace_branch(value, node)
    return f"{role} {branch}" if isinstance(branch, str) else branch


def _trace_branch(value: Value, reader: Node) -> Branch | str:
    between: list[Node] = []
    at: Node = reader
    while (node := value.producer) is not None:
        # A change of the linear would reach these other readers also.
        if other_readers := [n.op.name for n in value.users if n is not at] + ["the caller"] * value.is_output:
            return f"(%{value.name}) is read by {other_readers[0]} too"
        if len(value.uses) > 1:
            return f"(%{value.name}) is read twice by {at.op.name}"
        if node.op is ops.linear:
            break
        x = node.inputs[0]
        if node.op is ops.split and x is not None and x.producer is not None and x.producer.op is ops.linear:
            cut = is_feature_split(node) and len(x.users) == 1 and not x.is_output
            if not cut:
                return f"is a piece of %{x.name}, whose linear cannot be split"
            node = x.producer
            break
        if node.op is ops.norm_linear:
            return f"is made by norm_linear (%{value.name}); run fuse-norm-linear later"
        if not TOKENWISE_TRAITS & node.op.traits or x is None:
            return f"is made by {node.op.name} (%{value.name}), not by a linear"
        between.insert(0, node)
        at, value = node, x
    if node is None:
        return f"is %{value.name}, which no linear computes"
    if not are_params(node.inputs[1:]):
        return f"has a linear (%{node.output.name}) whose weight is computed"
    return Branch(node, value, tuple(between))


def unpack_branch(node: Node, role: str) -> Branch:
    """Split the linear of operand `role` (q, k or v) of `node` if it is packed. Return the branch, which must exist."""
    branch = find_branch(node, role)
    assert isinstance(branch, Branch)
    if branch.is_packed and branch.start.producer is not None:
        split_linear(branch.start.producer)
        return unpack_branch(node, role)
    return branch


def split_linear(split: Node) -> list[Value]:
    """Replace the node `split` and the linear before it by one linear per piece; return the outputs of the linears."""
    graph, linear = split.graph, split.required_operand("x").producer
    assert linear is not None
    packed_params = {name: p for name in ("weight", "bias") if isinstance(p := linear.operand(name), Param)}
    outputs, start = [], 0
    for piece in split.outputs:
        parts, rows = [], (start, start + piece.width)
        for name, packed in packed_params.items():
            recipe = slice_rows(packed.recipe, *rows, graph.reader)
            parts.append(derive_param(packed, recipe, (piece.width, *packed.shape[1:]), f"{piece.name}.{name}"))
        with graph.inserting(before=linear):
            y = ops.linear(linear.inputs[0], *parts)
        replace_uses(piece, y)
        outputs.append(y)
        start += piece.width
    erase_unused(graph, [split, linear])
    return outputs


def slice_rows(recipe: Recipe, start: int, stop: int, reader: TensorReader) -> Recipe:
    """Return a recipe of rows start:stop of `recipe`; if they are exactly one item of a Concat, return this item."""
    match recipe:
        case Concat(items, 0):
            parts, offset = [], 0
            for item in items:
                count = _count_rows(item, reader)
                if count is None:
                    return Slice(recipe, 0, start, stop)
                first, last = max(start - offset, 0), min(stop - offset, count)
                if first < last:
                    # A complete item stays as it is, so that unpacking restores the recipes before packing.
                    parts.append(item if last - first == count else slice_rows(item, first, last, reader))
                offset += count
            return parts[0] if len(parts) == 1 else Concat(tuple(parts))
        case Slice(item, 0, begin, _, 1):
            return slice_rows(item, begin + start, begin + stop, reader)
        case Take(item, indices, 0):
            return Take(item, indices[start:stop])
        case Full(value, dims):
            return Full(value, (stop - start, *dims[1:]))
    return recipe if _count_rows(recipe, reader) == stop - start else Slice(recipe, 0, start, stop)


def is_zero(recipe: Recipe) -> bool:
    """Return whether `recipe` is a fill with zeros or a concatenation of them, as for packed linears without biases."""
    if isinstance(recipe, Concat):
        return all(map(is_zero, recipe.items))
    return isinstance(recipe, Full) and recipe.value == 0


def _count_rows(recipe: Recipe, reader: TensorReader) -> int | None:
    """Return the length of the first axis of `recipe`; None if its checkpoint cannot be read."""
    try:
        return recipe.shape(reader)[0]
    except WeftError:
        return None
