"""Absorb a linear map of vectors into the weights of the linears and experts that read or write them.

A map is an `AxisMap`: the recipe of a tensor whose every vector along one axis is mapped. Vectors are rows, v → v M:
what writes v then writes v M, and what reads v M instead of v and must not notice takes M⁻ᵀ along the axis that it
reads (for a scale diag(g) that is now missing from v, diag(g) itself).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from weft.ir import Node, Param, Recipe, Value, ops
from weft.ir.recipes import Add, Permute, Scale
from weft.ir.recipes.matrices import Centre, MatMul

from .edit import changed, derive, derive_bias, replace_param

AxisMap = Callable[[Recipe, int, int], Recipe]  # a recipe, the axis to map, the rank
Use = tuple[Node, int]
# Op: its weights as operands with their biases; all read the last axis of theirs.
_READERS = {
    ops.linear: {"weight": "bias"},
    ops.norm_linear: {"weight": "bias"},
    ops.moe: {"up": "up_bias", "gate": "gate_bias"},
}
# Op: the operands that make its result, and which axis of them does, counted from the last.
_AFFINE = {"weight": 1, "bias": 1}
WRITERS = {
    ops.linear: {"weight": 2, "bias": 1},
    ops.norm_linear: {"weight": 2, "bias": 1},
    ops.moe: {"down": 2, "down_bias": 1},
    ops.embedding: {"table": 1},
    ops.rms_norm: {"weight": 1},
    ops.layer_norm: _AFFINE,
    ops.add_norm: _AFFINE,
}


def scaled(factor: float | Recipe) -> AxisMap:
    """Multiplication by a number, or by a vector element by element."""
    return lambda recipe, axis, rank: Scale(recipe, factor, axis)


def centred(recipe: Recipe, axis: int, rank: int) -> Recipe:
    """Subtraction of the mean."""
    return Centre(recipe, axis)


def multiplied(matrix: Recipe) -> AxisMap:
    """v → v M for a square `matrix` M."""

    def along(recipe: Recipe, axis: int, rank: int) -> Recipe:
        if rank == 1 or (rank == 2 and axis == 0):
            # Vectors along axis 0 are columns: (v M)ᵀ = Mᵀ vᵀ.
            return MatMul(Permute(matrix, (1, 0)), recipe)
        if axis == rank - 1:
            return MatMul(recipe, matrix)
        # `MatMul` maps the last axis only, so the axis moves there and back.
        swap = (*(a for a in range(rank) if a != axis), axis)
        back = tuple(swap.index(a) for a in range(rank))
        return Permute(MatMul(Permute(recipe, swap), matrix), back)

    return along


def is_layer(norm: Node) -> bool:
    """Return whether a norm, fused or not, subtracts the mean."""
    return norm.op is ops.layer_norm or norm.attrs.get("kind") == "layer"


def moves_rows(node: Node) -> bool:
    """Return whether the rows (last axis) of the result are rows of the first operand, of any operand of `concat`."""
    x = node.inputs[0] if node.inputs else None
    if x is None or not x.shape:
        return False
    last, attrs = len(x.shape) - 1, node.attrs
    match node.op:
        case ops.gather_rows:
            # The op picks along axis 1, which is the last axis of a matrix.
            return last > 1
        case ops.cast:
            return x.type.dtype.is_float and bool(attrs["to"].is_float)
        case ops.slice_ | ops.split | ops.concat | ops.gather:
            return bool(attrs["axis"] % (last + 1) != last)
        case ops.reshape | ops.expand:
            return bool(node.output.shape[-1:] == x.shape[-1:])
        case ops.squeeze:
            return all(a % (last + 1) != last for a in attrs["axes"])
        case ops.unsqueeze:
            return all(a % len(node.output.shape) != last + len(attrs["axes"]) for a in attrs["axes"])
        case ops.transpose:
            return bool(attrs["axes"][-1] % (last + 1) == last)
    return False


def reads(value: Value) -> list[Use] | str:
    """Who computes with the rows of `value`, also after they were moved; a sentence if they leave the graph."""
    found: list[Use] = []
    waiting = [value]
    for v in waiting:
        if v.is_output:
            return f"%{v.name} is an output of the graph"
        for node, i in v.uses:
            # A concat has rows of other values too, so a map of `value` cannot be followed through it.
            if i == 0 and node.op is not ops.concat and moves_rows(node):
                waiting += node.outputs
            else:
                found.append((node, i))
    return found


def unable(node: Node, index: int) -> str | None:
    """Say why `node` cannot absorb a map of its operand `index` into its weights; None if it can."""
    if node.op in (ops.add, ops.add_norm):
        return f"it is a summand of {node.op.name} (%{node.outputs[-1].name})"
    if node.op not in (ops.linear, ops.moe) or index:
        return f"it is read by {node.op.name} (%{node.output.name})"
    return computed(node)


def computed(node: Node) -> str | None:
    """Name the weight of `node` that is computed and not a parameter; None if there is none."""
    # These operands are activations or ids; all others should be weights.
    for name in (o.name for o in node.op.operands if o.name not in ("x", "y", "ids", "combine")):
        operand = node.operand(name)
        if operand is not None and not isinstance(operand, Param):
            return f"the {name} of {node.op.name} (%{node.output.name}) is computed"
    return None


def weights_read_with(node: Node) -> Iterator[Param]:
    """The weights that `node` reads its first operand with."""
    for name in _READERS[node.op]:
        weight = node.operand(name)
        if isinstance(weight, Param):
            yield weight


def read_through(node: Node, along: AxisMap | None, shift: Recipe | None = None) -> Node:
    """`node`, whose first operand was y, for an operand x of which y is `along` plus `shift`: y = x M + s.

    The weights take in `along` over their last axis, the biases what the weights make of `shift`. Returns the node, or
    the one that replaces it if biases had to be made.
    """
    made: dict[str, Recipe] = {}
    for name, bias in _READERS[node.op].items():
        weight, given = node.operand(name), node.operand(bias)
        if not isinstance(weight, Param):
            continue
        rank = len(weight.shape)
        if along is not None:
            made[name] = along(weight.recipe, rank - 1, rank)
        if shift is not None:
            added = MatMul(weight.recipe, shift)
            made[bias] = Add((given.recipe, added)) if isinstance(given, Param) else added
    return _reweighed(node, made)


def write_through(node: Node, along: AxisMap) -> None:
    """Let `node` write what `along` makes of its result: a linear, experts, an embedding, or a norm with a weight.

    Norms take numbers and vectors only, into weight and bias.
    """
    made = {}
    for name, axis in WRITERS[node.op].items():
        param = node.operand(name)
        if isinstance(param, Param):
            rank = len(param.shape)
            made[name] = along(param.recipe, rank - axis, rank)
    _reweighed(node, made)


def _reweighed(node: Node, recipes: Mapping[str, Recipe]) -> Node:
    """`node` with other recipes for the parameters named: itself, or another if biases had to be made."""
    old = {name: node.operand(name) for name in recipes}
    new = {name: _derived(node, name, recipe) for name, recipe in recipes.items()}
    # Operands that exist are set in place; a bias that is new needs a new node.
    if all(v is not None for v in old.values()):
        for name, param in new.items():
            node.set_input(node.op.operand_index(name), param)
    else:
        node = changed(node, new)
    for name in recipes:
        replace_param(old[name], new[name])
    return node


def _derived(node: Node, name: str, recipe: Recipe) -> Param:
    old = node.operand(name)
    if isinstance(old, Param):
        return derive(old, recipe)
    weight = node.operand(next(w for w, b in _READERS[node.op].items() if b == name))
    assert isinstance(weight, Param)
    return derive_bias(weight, recipe)
