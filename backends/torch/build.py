"""Build folders for the target torch: a readable model, its weights, and scripts that run without weft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node
from weft.ir.op import Growth, StateSpec
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import LAYOUTS
from weft.passes import Report
from weft.passes.analysis.states import caches, has_cache, manifest_records, named_states, states

from ..options import ACTIVATIONS, CACHE_DTYPE, KEEP_BLOCKS, Options
from ..safetensors import write_shards
from ..weights import weight_facts
from .ops import float8_caches
from .package import export
from .package.explain import explain, explain_cpu
from .program import quantized as blocks
from .program.positions import rolling_capacity
from .program.statements import TORCH_NAMES
from .program.states import cached_nodes, check_writes

WIDENS = "on a CPU PyTorch widens weights of FP8 and FP4 again for every token: that saves memory and costs time"
NARROW = "on a CPU quantized weights are fastest in bf16: --dtype bf16"


class TorchFolder:
    """The model of `forms`, those of the target torch, with weights in `dtype`, not written yet; `notes` are added to.

    Raises:
        WeftError: if the graph has caches of its own or cannot write text.
    """

    def __init__(self, forms: Mapping[str, Graph], dtype: str, options: Options, notes: list[str]) -> None:
        graph, self._dtype = forms[""], dtype
        if has_cache(graph):
            raise WeftError("target torch keeps caches by itself: leave out the pass kv-cache, and what needs it")
        check_writes(graph)
        given = {name: getattr(options, name) for name in options.listed()}
        float8 = given[CACHE_DTYPE] == "fp8"
        self._built = export.build(forms, float8)
        self._weights = export.weights(self._built, dtypes.parse(dtype))
        self.tensors = export.stored_tensors(self._built, self._weights)
        self.trace: list[str] = blocks.list_widened(graph)
        kept = blocks.summary(self._built.source.weights.values())
        self.idle = {KEEP_BLOCKS: reason} if given[KEEP_BLOCKS] and (reason := blocks.widens_all(graph)) else {}
        untold = float8_caches.describe_limits(graph) if float8 else []
        if float8 and not any(map(float8_caches.can_be_float8, float8_caches.attentions(graph))):
            self.idle[CACHE_DTYPE] = next(iter(untold), "no attention keeps keys and values")
        notes += untold
        if given[ACTIVATIONS] and not any(_floats(name) == 8 for name in kept):
            self.idle[ACTIVATIONS] = "no weights are FP8 blocks (--keep-blocks all keeps those of a checkpoint)"
        if any(map(_floats, kept)):
            notes.append(WIDENS)
        elif kept and dtypes.parse(dtype) != dtypes.bf16:
            notes.append(NARROW)
        self.weight_bytes = sum(w.nbytes for w in self._weights.values())
        self.facts = {
            "outputs": list(graph.outputs),
            "kernels": self._built.kernels,
            "weights": weight_facts(graph, self.tensors),
            **({CACHE_DTYPE: given[CACHE_DTYPE]} if float8 else {}),
            **({"kept_blocks": given[KEEP_BLOCKS], "blocks": kept} if kept else {}),
            **(_kept(graph) if self._built.keeps else {}),
        }

    def explain(self, report: Report) -> list[str]:
        """Return a line for each kind of node of a decode step on a GPU, and one on this CPU."""
        import torch

        kind = getattr(torch, TORCH_NAMES[self._dtype])
        return [*map(str, explain(self._built.lowered.graph, self._built.step, report, kind)), explain_cpu(kind)]

    def write(self, folder: Path, step: Callable[[int], None]) -> None:
        """Write everything into `folder`; `step` is told the bytes just written."""
        export.write_code(self._built, folder)
        write_shards(folder, self._weights, step=step)


def _floats(name: str) -> int:
    """The bits of the floats that codes of the layout called `name` are; 0 if they are integers."""
    return LAYOUTS[name].bits if name in LAYOUTS and LAYOUTS[name].floats else 0


def _kept(graph: Graph) -> dict[str, Any]:
    """Describe the model's caches and states for the manifest."""
    cached = cached_nodes(graph)
    return manifest_records(graph, named_states(_states(node) for node in graph.nodes if node in cached))


def _states(node: Node) -> tuple[StateSpec, ...]:
    """List the states of `node`; the caches of attentions with windows roll wherever they can."""
    room = rolling_capacity(node)
    if room is None:
        return caches(node) or states(node)
    return tuple(replace(s, growth=Growth.WINDOW, type=s.type.with_axis(2, room[0])) for s in caches(node))
