"""Layouts for the weight matrices of a graph under a budget of bits: what matters most to the outputs gets the most.

How much a matrix matters is measured: it alone is rounded, and the divergence of the graph's outputs on a text
is what that costs. Rounding errors are small and hardly related, so the costs of matrices add up, and that of another
layout is in proportion to the squared errors it makes of what the matrix multiplies. Choosing a layout for each matrix
is then a knapsack problem, of which the relaxation by a price for bits is solved: HAWQ-V3 (Yao 2021, arXiv 2011.10680).
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
from .matrices import Matrix, matrices
from .quantizing import Progress, reweigh

TOKENS = 256  # of the text, on which outputs are compared: divergences are expectations over all tokens of a vocabulary
BISECTIONS = 60


@dataclass(frozen=True)
class Choice:
    """A layout that a matrix may get, its bits, and what it is expected to cost."""

    layout: BlockLayout
    bits: float
    cost: float


def within_budget(
    graph: Graph,
    texts: Sequence[Array],
    units: Sequence[Sequence[Matrix]],
    layouts: Sequence[BlockLayout],
    budget: float,
    progress: Progress = lambda done, total: None,
) -> dict[Matrix, BlockLayout]:
    """Return a layout of `layouts` for every matrix, with `budget` bits for a weight on average; those of a unit of
    `units` get the same.

    Raises:
        WeftError: if all matrices in the smallest layout take more.
    """
    total = sum(matrix.elements for unit in units for matrix in unit)
    least = sum(min(sum(_bits(matrix, layout) for matrix in unit) for layout in layouts) for unit in units) / total
    if least > budget:
        raise WeftError(
            f"quantize: budget={budget:g} is less than the {math.ceil(1000 * least) / 1000:g} bits that a weight takes "
            "at least: give more, or let it choose codes of fewer bits (choices=)"
        )
    # Near the budget divergences are in proportion to squared errors; those of far fewer bits are beyond that.
    probe = min(layouts, key=lambda layout: abs(layout.bits_per_weight - budget))
    measured = _costs(graph, _first(texts), units, layouts, probe, progress)
    tables = [
        [Choice(layout, sum(_bits(matrix, layout) for matrix in unit), cost) for layout, cost in costs.items()]
        for unit, costs in zip(units, measured, strict=True)
    ]
    chosen = knapsack(tables, budget * total)
    return {matrix: choice.layout for unit, choice in zip(units, chosen, strict=True) for matrix in unit}


def _bits(matrix: Matrix, layout: BlockLayout) -> float:
    """The bits of a matrix, whose rows are filled up to whole groups."""
    width = int(matrix.param.shape[-1])
    return matrix.elements // width * (-(-width // layout.group) * layout.group) * layout.bits_per_weight


def knapsack(tables: Sequence[Sequence[Choice]], capacity: float) -> list[Choice]:
    """Choose one of each table so that costs are small and bits are at most `capacity`, which the smallest fit.

    A price for bits is bisected; what its choices leave over goes to whatever saves the most for a bit.
    """

    def at(price: float) -> list[Choice]:
        return [min(table, key=lambda c: (c.cost + price * c.bits, c.bits)) for table in tables]

    low, high = 0.0, 1.0
    if sum(c.bits for c in at(low)) <= capacity:
        return at(low)
    while sum(c.bits for c in at(high)) > capacity:
        high *= 4
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(c.bits for c in at(middle)) <= capacity else (middle, high)
    chosen = at(high)
    while True:
        left = capacity - sum(c.bits for c in chosen)
        gains = [
            ((now.cost - c.cost) / (c.bits - now.bits), i, c)
            for i, (now, table) in enumerate(zip(chosen, tables, strict=True))
            for c in table
            if 0 < c.bits - now.bits <= left and c.cost < now.cost
        ]
        if not gains:
            return chosen
        _, best, choice = max(gains, key=lambda gain: gain[:2])
        chosen[best] = choice


def _first(texts: Sequence[Array]) -> list[Array]:
    """The first `TOKENS` tokens of `texts`, or one text if that is longer."""
    found: list[Array] = []
    left = TOKENS
    for ids in texts:
        rows = ids[: max(1, left // ids.shape[1])]
        found.append(rows)
        left -= rows.size
        if left < ids.shape[1]:
            break
    return found


def _costs(
    graph: Graph,
    texts: Sequence[Array],
    units: Sequence[Sequence[Matrix]],
    layouts: Sequence[BlockLayout],
    probe: BlockLayout,
    progress: Progress,
) -> list[dict[BlockLayout, float]]:
    """Measure the cost of each layout of each unit: nats a token, or without logits the relative error of outputs.
    Units are measured in the layout `probe`."""
    graph = graph.clone()
    twins = _spilled(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    activations = Activations(graph, texts, dtype=np.float32)
    output = graph.outputs.get("logits") or next(iter(graph.outputs.values()))
    exact = Activations(graph, texts, dtype=np.float32)(output)
    found: list[dict[BlockLayout, float]] = [{} for _ in units]
    done, total = 0, sum(matrix.elements for unit in units for matrix in unit)
    copies = [[twins[matrix.param.name] for matrix in unit] for unit in units]
    # In the order of the graph, so that all that stands before a matrix is known when it is its turn.
    for at in sorted(range(len(units)), key=lambda i: order[copies[i][0].readers[0]]):
        progress(done, total)
        rounded: dict[Value, Array] = {}
        errors = dict.fromkeys(layouts, 0.0)
        for matrix in copies[at]:
            weight = matrix.param.recipe.evaluate(graph.reader)
            sizes = _sizes(activations, matrix)
            for layout in layouts:
                numbers = layout.dequantize(round_rows(weight, layout, (matrix.param.name,)))
                numbers = numbers[..., : weight.shape[-1]]
                errors[layout] += float((np.square(numbers - weight) * sizes).sum())
                if layout is probe:
                    rounded[matrix.param] = numbers
            done += matrix.elements
        with activations.replaced(rounded):
            cost = divergence(exact, activations(output), logits="logits" in graph.outputs)
        scale = cost / errors[probe] if errors[probe] else 0.0
        found[at] = {layout: scale * error for layout, error in errors.items()}
    progress(total, total)
    return found


def _spilled(graph: Graph) -> dict[str, Matrix]:
    """The matrices of `graph` by name, computed once, to a file: they are read for every matrix that is measured."""
    reader = graph.reader = SpilledTensors(graph.reader)
    for name, found in [(param.name, found) for param, found in matrices(graph).items()]:
        param = graph.params[name]
        if isinstance(found, Matrix) and not isinstance(param.recipe, Source):
            key = reader.fresh(name)
            reader.put(key, param.recipe.evaluate(reader).astype(np.float32, copy=False))
            reweigh(param, Source(key))
    return {param.name: found for param, found in matrices(graph).items() if isinstance(found, Matrix)}


def _sizes(activations: Activations, matrix: Matrix) -> Array:
    """The mean squares [in] of what the matrix multiplies first; of experts' hidden numbers they count as equal."""
    node = matrix.readers[0]
    if node.op is ops.moe and matrix.param is node.operand("down"):
        activations(node.required("x"))  # what comes before stays known
        return np.ones(int(matrix.param.shape[-1]), np.float32)
    parts = activations(node.required("x"))
    if node.op is ops.norm_linear:
        norm = (ops.rms_norm if node.attrs["kind"] == "rms" else ops.layer_norm).reference
        parts = [np.asarray(norm(part, eps=node.attrs["eps"])) for part in parts]
    flat = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
    sizes: Array = np.square(flat.astype(np.float32)).mean(0)
    return sizes


def divergence(exact: Sequence[Array], changed: Sequence[Array], logits: bool) -> float:
    """The mean of Σ p ln(p/q) over positions of `logits`; of other outputs the squared error relative to the square."""
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


def report(plan: Mapping[Matrix, BlockLayout]) -> list[str]:
    """Lines that tell who got what: a layout, the bits of a weight, and the names that end in it."""
    by_layout: dict[BlockLayout, list[Matrix]] = {}
    for matrix, layout in plan.items():
        by_layout.setdefault(layout, []).append(matrix)
    total = sum(matrix.elements for matrix in plan)
    lines = []
    for layout, found in sorted(by_layout.items(), key=lambda item: item[0].bits_per_weight):
        share = sum(matrix.elements for matrix in found) / total
        names = ", ".join(matrix.param.name for matrix in found)
        lines.append(f"{layout} ({layout.bits_per_weight:.3g} bits a weight), {share:.1%} of the weights: {names}")
    bits = sum(_bits(matrix, layout) for matrix, layout in plan.items()) / total
    return [*lines, f"{bits:.3f} bits a weight on average"]
