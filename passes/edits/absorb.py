"""Absorb a linear map of vectors into the weights of the linears and experts that read or write them.

An `AxisMap` maps a recipe: every vector v along one axis of the tensor becomes v M (vectors are rows). Mapping a
writer's weights by M makes it write v M. A reader of v M keeps its result if its weight is mapped by M⁻ᵀ along its
input axis; if v was divided by g elementwise, the weight is multiplied by g.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from weft.ir import Node, Param, Recipe, Value, ops
from weft.ir.recipes import Add, Permute, Scale
from weft.ir.recipes.matrices import Centre, MatMul

from .edit import derive_bias, derive_param, rebuild_node, replace_param

AxisMap = Callable[[Recipe, int, int], Recipe]  # (recipe, axis to map, rank of the tensor) -> the mapped recipe
Use = tuple[Node, int]
# By op, its weight operands with their biases; each weight multiplies along its last axis.
_INPUT_WEIGHTS = {
    ops.linear: {"weight": "bias"},
    ops.norm_linear: {"weight": "bias"},
    ops.moe: {"up": "up_bias", "gate": "gate_bias"},
}
# By op, the operands that absorb a map of its result, and their output axis, counted from the end (1 is the last).
_AFFINE = {"weight": 1, "bias": 1}
OUTPUT_WEIGHTS = {
    ops.linear: {"weight": 2, "bias": 1},
    ops.norm_linear: {"weight": 2, "bias": 1},
    ops.moe: {"down": 2, "down_bias": 1},
    ops.embedding: {"table": 1},
    ops.rms_norm: {"weight": 1},
    ops.layer_norm: _AFFINE,
    ops.add_norm: _AFFINE,
}


def make_scale_map(factor: float | Recipe) -> AxisMap:
    """Return the map v → v · factor; `factor` is a number, or a vector (a recipe) multiplied elementwise."""
    return lambda recipe, axis, rank: Scale(recipe, factor, axis)


def subtract_mean(recipe: Recipe, axis: int, rank: int) -> Recipe:
    """Return `recipe` with the mean of every vector along `axis` subtracted; the function is an `AxisMap`."""
    return Centre(recipe, axis)


def make_matrix_map(matrix: Recipe) -> AxisMap:
    """Return the map v → v M for a square `matrix` M."""

    def axis_map(recipe: Recipe, axis: int, rank: int) -> Recipe:
        if rank == 1 or (rank == 2 and axis == 0):
            # Vectors along axis 0 are columns: (v M)ᵀ = Mᵀ vᵀ.
            return MatMul(Permute(matrix, (1, 0)), recipe)
        if axis == rank - 1:
            return MatMul(recipe, matrix)
        # `MatMul` maps the last axis only, so the axis moves there and back.
        swap = (*(a for a in range(rank) if a != axis), axis)
        back = tuple(swap.index(a) for a in range(rank))
        return Permute(MatMul(Permute(recipe, swap), matrix), back)

    return axis_map


def is_layer_norm(norm: Node) -> bool:
    """Return whether `norm` is a layer norm: layer_norm, or a fused op with the attribute kind="layer"."""
    return norm.op is ops.layer_norm or norm.attrs.get("kind") == "layer"


def is_row_move(node: Node) -> bool:
    """Return whether each row (vector along the last axis) of `node`'s outputs is a row of its first operand.

    For concat, it may be a row of any operand. A cast from float to float counts as such a move.
    """
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


def find_readers(value: Value) -> list[Use] | str:
    """Return the uses (node, operand index) of `value` and of the values that nodes derive from it by moving its rows.

    A node that only moves rows (`is_row_move`) is not a use, but a concat is. Return a reason (str) if `value` or one
    of the derived values is a graph output.
    """
    uses: list[Use] = []
    waiting = [value]
    for v in waiting:
        if v.is_output:
            return f"%{v.name} is an output of the graph"
        for node, i in v.uses:
            # A concat has rows of other values too, so a map of `value` cannot be followed through it.
            if i == 0 and node.op is not ops.concat and is_row_move(node):
                waiting += node.outputs
            else:
                uses.append((node, i))
    return uses


def explain_refusal(node: Node, index: int) -> str | None:
    """Return a reason (str) why `node` cannot absorb a map of its operand `index` into its weights; None if it can.

    Only a linear or moe can, for operand 0, if its weights and biases are parameters.
    """
    if node.op in (ops.add, ops.add_norm):
        return f"it is a summand of {node.op.name} (%{node.outputs[-1].name})"
    if node.op not in (ops.linear, ops.moe) or index:
        return f"it is read by {node.op.name} (%{node.output.name})"
    return find_computed_weight(node)


def find_computed_weight(node: Node) -> str | None:
    """Return a sentence that names the first weight or bias of `node` that is not a parameter; None if all are."""
    # These operands are activations or ids; all others should be weights.
    for name in (o.name for o in node.op.operands if o.name not in ("x", "y", "ids", "combine")):
        operand = node.operand(name)
        if operand is not None and not isinstance(operand, Param):
            return f"the {name} of {node.op.name} (%{node.output.name}) is computed"
    return None


def find_input_weights(node: Node) -> Iterator[Param]:
    """Yield the weights that multiply the first operand of `node`: of a (norm_)linear, or up and gate of a moe."""
    for name in _INPUT_WEIGHTS[node.op]:
        weight = node.operand(name)
        if isinstance(weight, Param):
            yield weight


def absorb_input_map(node: Node, axis_map: AxisMap | None, shift: Recipe | None = None) -> Node:
    """Absorb the map y = x M + s into the weights of `node` (linear, norm_linear or moe), which reads y.

    `axis_map` must be v → v Mᵀ: it maps the last (input) axis of the weights (None: M is the identity). `shift` is s;
    its product with each weight is added to the bias. The caller replaces y by x. Return `node`, or its replacement
    with a new bias.
    """
    recipes: dict[str, Recipe] = {}
    for name, bias in _INPUT_WEIGHTS[node.op].items():
        weight, old_bias = node.operand(name), node.operand(bias)
        if not isinstance(weight, Param):
            continue
        rank = len(weight.shape)
        if axis_map is not None:
            recipes[name] = axis_map(weight.recipe, rank - 1, rank)
        if shift is not None:
            added = MatMul(weight.recipe, shift)
            recipes[bias] = Add((old_bias.recipe, added)) if isinstance(old_bias, Param) else added
    return _replace_recipes(node, recipes)


def absorb_output_map(node: Node, axis_map: AxisMap) -> None:
    """Map the weights and biases of `node` in place, so that `axis_map` maps the last axis of its result.

    `node` is a linear, norm_linear, moe, embedding, or a norm with a weight. Norms absorb only `make_scale_map`.
    """
    recipes = {}
    for name, axis in OUTPUT_WEIGHTS[node.op].items():
        param = node.operand(name)
        if isinstance(param, Param):
            rank = len(param.shape)
            recipes[name] = axis_map(param.recipe, rank - axis, rank)
    _replace_recipes(node, recipes)


def _replace_recipes(node: Node, recipes: Mapping[str, Recipe]) -> Node:
    """Set operands of `node` to parameters with `recipes`; return `node`, or its replacement with a new bias."""
    old = {name: node.operand(name) for name in recipes}
    new = {name: _derive_operand(node, name, recipe) for name, recipe in recipes.items()}
    # Operands that exist are set in place; a bias that is new needs a new node.
    if all(v is not None for v in old.values()):
        for name, param in new.items():
            node.set_input(node.op.operand_index(name), param)
    else:
        node = rebuild_node(node, new)
    for name in recipes:
        replace_param(old[name], new[name])
    return node


def _derive_operand(node: Node, name: str, recipe: Recipe) -> Param:
    old = node.operand(name)
    if isinstance(old, Param):
        return derive_param(old, recipe)
    weight = node.operand(next(w for w, b in _INPUT_WEIGHTS[node.op].items() if b == name))
    assert isinstance(weight, Param)
    return derive_bias(weight, recipe)
