"""Switchable adapters: every linear layer that an adapter updates gets a second path, x ↦ B (A x).

The factors A and B are slots: parameters that ONNX Runtime fills at run time with zeros or the chosen adapter's
factors. Passes rewrite slots like weights, so a scale that a pass folds into a weight is folded into the factors too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes import Source
from weft.ir.recipes.readers import Array, SwitchedTensors
from weft.ir.types import TensorType, dtypes

from .adapter import Adapter, Update, read_adapter
from .quantized.tensor import read_all

_BASE = "model."


def add_slots(graph: Graph, source: str, folders: Sequence[Path]) -> None:
    """Add slots for the adapters in `folders` to the linear layers of `graph` (called `source` in errors), in place.

    The rank of a slot is the highest among its adapters; factors of lower rank are padded with zeros. B includes the
    scale. The graph's reader becomes a `SwitchedTensors`, which has the factors of all adapters.

    Raises:
        WeftError: if an adapter has tensors besides low-rank updates of linear layers, or does not fit the model, or
            two folders have the same name.
    """
    adapters = [read_adapter(folder, number) for number, folder in enumerate(folders)]
    names = [adapter.path.name for adapter in adapters]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise WeftError(f"two adapter folders have the name {repeated}: rename one of them")
    weights = {p.recipe.key: p for p in graph.params.values() if isinstance(p.recipe, Source)}
    updates: dict[str, list[tuple[Adapter, Update]]] = {}
    for adapter in adapters:
        _check_plain(adapter)
        for name, update in adapter.updates.items():
            updates.setdefault(_find_home(name, update, weights, adapter, source), []).append((adapter, update))
    shapes: dict[str, tuple[int, ...]] = {}
    choices: dict[str, dict[str, Array]] = {name: {} for name in names}
    for home, parts in updates.items():
        param, rank = weights[home], max(update.rank for _, update in parts)
        down, up = f"{home.removesuffix('weight')}lora_A", f"{home.removesuffix('weight')}lora_B"
        shapes |= {down: (rank, param.shape[1]), up: (param.shape[0], rank)}
        _add_path(graph, param, shapes, down, up)
        for adapter, update in parts:
            missing = rank - update.rank
            choices[adapter.path.name] |= {
                down: np.pad(read_all(adapter.reader, update.down), ((0, missing), (0, 0))),
                up: np.pad(np.float32(update.scale) * read_all(adapter.reader, update.up), ((0, 0), (0, missing))),
            }
    graph.reader = SwitchedTensors(graph.reader, shapes, choices)


def _check_plain(adapter: Adapter) -> None:
    advice = "which cannot be switched at run time: merge the adapter by --adapter"
    for key in (*adapter.resaved.values(), *adapter.replaced.values(), *(t.key for t in adapter.tokens.values())):
        raise adapter.error(f" has the tensor {key!r}, {advice}")
    for update in adapter.updates.values():
        if update.magnitude or update.bias or update.embedding or update.stacked:
            raise adapter.error(f" has {update.magnitude or update.bias or update.down!r}, {advice}")


def _find_home(name: str, update: Update, weights: Mapping[str, Param], adapter: Adapter, source: str) -> str:
    """Return the key in `weights` of the weight that adapters call `name`; raise WeftError if `update` does not fit."""
    key = next((k for k in (name, _BASE + name, name.removeprefix(_BASE)) if k in weights), None)
    if key is None:
        raise adapter.error(f": {update.down!r} updates a weight that no linear layer of {source} reads as stored")
    param, down, up = weights[key], adapter.reader.shape(update.down), adapter.reader.shape(update.up)
    if (up[0], down[1]) != param.shape:
        raise adapter.error(
            f": {adapter.describe_tensors(update.up, update.down)} do not fit {key} {list(param.shape)}"
        )
    if any(node.op is not ops.linear or node.operand("weight") is not param for node in param.users):
        raise adapter.error(f" updates {key}, which other ops than linear read too: merge the adapter by --adapter")
    return key


def _add_path(graph: Graph, param: Param, shapes: Mapping[str, tuple[int, ...]], down: str, up: str) -> None:
    """Add B (A x) to the output of each linear op that reads `param`; `down`, `up`: keys of A and B, with `shapes`."""
    a, b = (graph.add_param(key, TensorType(dtypes.f32, shapes[key]), Source(key)) for key in (down, up))
    for node in param.users:
        x, y = node.required_operand("x"), node.output
        with graph.inserting(after=node):
            total = ops.add(y, ops.linear(ops.linear(x, a, name=down), b, name=up))
        assert total.producer is not None
        y.replace_uses(total, keep=[total.producer])
        y.name, total.name = total.name, y.name
