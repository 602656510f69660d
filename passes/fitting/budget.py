"""Layouts for the weight matrices of a graph under a budget of bits: more bits for matrices that change outputs more.

The cost of a matrix is the divergence of the graph's outputs on calibration sequences when only this matrix is rounded
to one layout. For other layouts, the cost is scaled by the squared errors of the matrix's products. Rounding errors are
small and hardly correlated, so the costs of matrices add up. Choosing a layout for each matrix is then a knapsack
problem, solved by its relaxation with a price for bits: HAWQ-V3 (Yao 2021, arXiv 2011.10680).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.ir import Graph, Value, WeftError, ops
from weft.ir.recipes import Source
from weft.ir.recipes.blocks.quantize import round_rows
from weft.ir.recipes.readers import Array, SpilledTensors
from weft.ir.types.block_layouts import BlockLayout

from .calibration import Activations
from .matrices import Matrix, find_matrices
from .quantizing import Progress, apply_norm, replace_recipe

TOKENS = 256  # tokens on which outputs are compared; few suffice, as divergences average over the vocabulary
BISECTIONS = 60  # of the price of a bit


@dataclass(frozen=True)
class LayoutChoice:
    """A candidate layout of a unit (matrices that share a layout), with its total bits and expected cost."""

    layout: BlockLayout
    bits: float
    cost: float


def choose_layouts(
    graph: Graph,
    texts: Sequence[Array],
    units: Sequence[Sequence[Matrix]],
    layouts: Sequence[BlockLayout],
    budget: float,
    progress: Progress = lambda done, total: None,
) -> dict[Matrix, BlockLayout]:
    """Return one of `layouts` for every matrix, with at most `budget` bits per weight on average.

    All matrices of a unit get the same layout. `texts` are calibration batches of token ids [batch, length];
    `progress` is called as progress(elements done, elements in total).

    Raises:
        WeftError: if the matrices need more than `budget` bits even in their smallest layouts.
    """
    total = sum(matrix.elements for unit in units for matrix in unit)
    least = sum(min(sum(_count_bits(m, layout) for m in unit) for layout in layouts) for unit in units) / total
    if least > budget:
        raise WeftError(
            f"quantize: budget={budget:g} is below {math.ceil(1000 * least) / 1000:g} bits, the least possible: "
            "raise budget=, or allow codes of fewer bits in choices="
        )
    # Divergences are proportional to squared errors near the budget only, not for far fewer bits.
    probe = min(layouts, key=lambda layout: abs(layout.bits_per_weight - budget))
    measured = _measure_costs(graph, _take_first(texts), units, layouts, probe, progress)
    tables = [
        [LayoutChoice(layout, sum(_count_bits(m, layout) for m in unit), cost) for layout, cost in costs.items()]
        for unit, costs in zip(units, measured, strict=True)
    ]
    chosen = solve_knapsack(tables, budget * total)
    return {matrix: choice.layout for unit, choice in zip(units, chosen, strict=True) for matrix in unit}


def _count_bits(matrix: Matrix, layout: BlockLayout) -> float:
    """Return the number of bits of `matrix` in `layout`, with rows padded to complete groups."""
    width = int(matrix.param.shape[-1])
    return matrix.elements // width * (-(-width // layout.group) * layout.group) * layout.bits_per_weight


def solve_knapsack(tables: Sequence[Sequence[LayoutChoice]], capacity: float) -> list[LayoutChoice]:
    """Return one entry per table, with at most `capacity` bits in total and an approximately minimal total cost.

    The smallest entries must fit into `capacity`. A price for bits is bisected; the remaining bits are spent greedily
    on the entries that reduce the cost most per bit.
    """

    def choose(price: float) -> list[LayoutChoice]:
        return [min(table, key=lambda c: (c.cost + price * c.bits, c.bits)) for table in tables]

    low, high = 0.0, 1.0
    if sum(c.bits for c in choose(low)) <= capacity:
        return choose(low)
    while sum(c.bits for c in choose(high)) > capacity:
        high *= 4
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(c.bits for c in choose(middle)) <= capacity else (middle, high)
    chosen = choose(high)
    while True:
        spare = capacity - sum(c.bits for c in chosen)
        gains = [
            ((now.cost - c.cost) / (c.bits - now.bits), i, c)
            for i, (now, table) in enumerate(zip(chosen, tables, strict=True))
            for c in table
            if 0 < c.bits - now.bits <= spare and c.cost < now.cost
        ]
        if not gains:
            return chosen
        _, best, choice = max(gains, key=lambda gain: gain[:2])
        chosen[best] = choice


def _take_first(texts: Sequence[Array]) -> list[Array]:
    """Return the first sequences of `texts` (ids [batch, length]): about `TOKENS` tokens, at least one sequence."""
    batches: list[Array] = []
    remaining = TOKENS
    for ids in texts:
        rows = ids[: max(1, remaining // ids.shape[1])]
        batches.append(rows)
        remaining -= rows.size
        if remaining < ids.shape[1]:
            break
    return batches


def _measure_costs(
    graph: Graph,
    texts: Sequence[Array],
    units: Sequence[Sequence[Matrix]],
    layouts: Sequence[BlockLayout],
    probe: BlockLayout,
    progress: Progress,
) -> list[dict[BlockLayout, float]]:
    """Return the cost of each unit in every layout: measured for `probe`, for others scaled by their squared errors.
    A cost is in nats per token; for a graph without logits, it is the relative squared error of the first output."""
    graph = graph.clone()
    spilled = _spill_matrices(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    activations = Activations(graph, texts, dtype=np.float32)
    output = graph.outputs.get("logits") or next(iter(graph.outputs.values()))
    exact = Activations(graph, texts, dtype=np.float32)(output)
    costs: list[dict[BlockLayout, float]] = [{} for _ in units]
    done, total = 0, sum(matrix.elements for unit in units for matrix in unit)
    copies = [[spilled[matrix.param.name] for matrix in unit] for unit in units]
    # In the order of the graph, so that the activations before a matrix are already computed when it is measured.
    for index in sorted(range(len(units)), key=lambda i: order[copies[i][0].readers[0]]):
        progress(done, total)
        rounded: dict[Value, Array] = {}
        errors = dict.fromkeys(layouts, 0.0)
        for matrix in copies[index]:
            weight = matrix.param.recipe.evaluate(graph.reader)
            sizes = _compute_input_squares(activations, matrix)
            for layout in layouts:
                values = layout.dequantize(round_rows(weight, layout, (matrix.param.name,)))
                values = values[..., : weight.shape[-1]]
                errors[layout] += float((np.square(values - weight) * sizes).sum())
                if layout is probe:
                    rounded[matrix.param] = values
            done += matrix.elements
        with activations.override(weights=rounded):
            cost = measure_divergence(exact, activations(output), logits="logits" in graph.outputs)
        scale = cost / errors[probe] if errors[probe] else 0.0
        costs[index] = {layout: scale * error for layout, error in errors.items()}
    progress(total, total)
    return costs


def _spill_matrices(graph: Graph) -> dict[str, Matrix]:
    """Evaluate the computed matrices of `graph` into a temporary f32 file; return all matrices, keyed by name."""
    reader = graph.reader = SpilledTensors(graph.reader)
    for name, matrix in [(param.name, matrix) for param, matrix in find_matrices(graph).items()]:
        param = graph.params[name]
        if isinstance(matrix, Matrix) and not isinstance(param.recipe, Source):
            key = reader.unique_key(name)
            reader.put(key, param.recipe.evaluate(reader).astype(np.float32, copy=False))
            replace_recipe(param, Source(key))
    return {param.name: matrix for param, matrix in find_matrices(graph).items() if isinstance(matrix, Matrix)}


def _compute_input_squares(activations: Activations, matrix: Matrix) -> Array:
    """Return the mean squares f32 [in] of the inputs of `matrix` in its first reader; ones for the down of experts."""
    node = matrix.readers[0]
    if node.op is ops.moe and matrix.param is node.operand("down"):
        activations(node.required_operand("x"))  # computes the values before it, which stay cached
        return np.ones(int(matrix.param.shape[-1]), np.float32)
    parts = apply_norm(node, activations(node.required_operand("x")))
    flat = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
    sizes: Array = np.square(flat.astype(np.float32)).mean(0)
    return sizes


def measure_divergence(exact: Sequence[Array], changed: Sequence[Array], logits: bool) -> float:
    """Return the divergence of `changed` from `exact`, two lists of arrays [..., n] (one per batch).

    For `logits`, it is the mean over positions of KL(exact ‖ changed) in nats; else |exact - changed|² / |exact|².
    """
    total, count = 0.0, 0.0
    for before, after in zip(exact, changed, strict=True):
        if logits:
            p, q = _log_softmax(before), _log_softmax(after)
            q -= p
            total -= float(np.einsum("...i,...i->...", np.exp(p, out=p), q).sum(dtype=np.float64))
            count += p.size / p.shape[-1]
        else:
            total += float(np.square(before.astype(np.float64) - after).sum())
            count += float(np.square(before.astype(np.float64)).sum())
    return max(0.0, total / count) if count else 0.0


def _log_softmax(logits: Array) -> Array:
    shifted: Array = logits.astype(np.float32) - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def report_layouts(layouts: Mapping[Matrix, BlockLayout]) -> list[str]:
    """Return a line per layout (bits per weight, share of the weights, matrix names), and one with the average bits."""
    by_layout: dict[BlockLayout, list[Matrix]] = {}
    for matrix, layout in layouts.items():
        by_layout.setdefault(layout, []).append(matrix)
    total = sum(matrix.elements for matrix in layouts)
    lines = []
    for layout, members in sorted(by_layout.items(), key=lambda item: item[0].bits_per_weight):
        share = sum(matrix.elements for matrix in members) / total
        names = ", ".join(matrix.param.name for matrix in members)
        lines.append(f"{layout} ({layout.bits_per_weight:.3g} bits a weight), {share:.1%} of the weights: {names}")
    bits = sum(_count_bits(matrix, layout) for matrix, layout in layouts.items()) / total
    return [*lines, f"{bits:.3f} bits a weight on average"]
