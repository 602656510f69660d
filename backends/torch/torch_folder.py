"""Build folders of the target torch: a readable model, its weights, and scripts that run without weft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node
from weft.ir.op import Growth, StateSpec
from weft.ir.types import dtypes
from weft.ir.types.block_layouts import LAYOUTS
from weft.passes import Report
from weft.passes.analysis.states import find_caches, find_states, has_cache, make_manifest_records, name_states

from ..options import ACTIVATIONS, CACHE_DTYPE, KEEP_BLOCKS, Options
from ..safetensors import write_shards
from ..weights import summarize_weights
from .ops import compact_caches
from .package import source_folder as export
from .package.explain import explain_cpu, explain_step
from .program import block_params as blocks
from .program.stateful_nodes import check_cache_writes, find_cached_nodes, find_rolling_capacity
from .program.statements import TORCH_NAMES

WIDENING_NOTE = "on a CPU, weights in FP8 and FP4 are dequantized for every token: this saves memory but costs time"
BF16_NOTE = "on a CPU quantized weights are fastest in bf16: --dtype bf16"


class TorchFolder:
    """A folder of target torch before it is written: readable source, and the weights in `dtype`.

    forms: graphs by name: "" is the optimized model, for reports; "model" and, if present, "step" (the decode step) are
    lowered to source. options: settings of the target. notes: receives notes for the user.

    Raises:
        WeftError: if the graph has cache operands, or a node with a cache runs on a subset of the tokens.
    """

    def __init__(self, forms: Mapping[str, Graph], dtype: str, options: Options, notes: list[str]) -> None:
        graph, self._dtype = forms[""], dtype
        if has_cache(graph):
            raise WeftError(
                "target torch adds caches by itself: leave out the pass kv-cache and the passes that need it"
            )
        check_cache_writes(graph)
        settings = {name: getattr(options, name) for name in options.list_all()}
        float8 = settings[CACHE_DTYPE] == "fp8"
        self._built = export.generate_model(forms, float8)
        self._weights = export.list_weights(self._built, dtypes.parse(dtype))
        self.tensors = export.describe_tensors(self._built, self._weights)
        self.trace: list[str] = blocks.describe_widened_weights(graph)
        stored = blocks.count_block_weights(self._built.source.weights.values())
        reason = blocks.explain_no_blocks(graph) if settings[KEEP_BLOCKS] else ""
        self.idle = {KEEP_BLOCKS: reason} if reason else {}
        limits = compact_caches.describe_limits(graph) if float8 else []
        if float8 and not any(map(compact_caches.can_be_float8, compact_caches.find_kv_attentions(graph))):
            self.idle[CACHE_DTYPE] = next(iter(limits), "no attention caches keys and values")
        notes += limits
        if settings[ACTIVATIONS] and not any(_float_bits(name) == 8 for name in stored):
            self.idle[ACTIVATIONS] = "no weights are FP8 blocks (--keep-blocks all keeps those of a checkpoint)"
        if any(map(_float_bits, stored)):
            notes.append(WIDENING_NOTE)
        elif stored and dtypes.parse(dtype) != dtypes.bf16:
            notes.append(BF16_NOTE)
        self.weight_bytes = sum(w.nbytes for w in self._weights.values())
        cached = find_cached_nodes(graph)
        states = name_states(_list_states(node) for node in graph.nodes if node in cached)
        self.facts = {
            "outputs": list(graph.outputs),
            "kernels": self._built.kernels,
            "weights": summarize_weights(graph, self.tensors),
            **({CACHE_DTYPE: settings[CACHE_DTYPE]} if float8 else {}),
            **({"kept_blocks": settings[KEEP_BLOCKS], "blocks": stored} if stored else {}),
            **(make_manifest_records(graph, states) if self._built.keeps else {}),
        }

    def explain(self, report: Report) -> list[str]:
        """Return one line for each group of equal nodes of a decode step on a Hopper GPU, and one line on this CPU."""
        import torch

        kind = getattr(torch, TORCH_NAMES[self._dtype])
        return [*map(str, explain_step(self._built.lowered.graph, self._built.step, report, kind)), explain_cpu(kind)]

    def write(self, folder: Path, step: Callable[[int], None]) -> None:
        """Write the code and the weights into `folder`; call `step` with the number of bytes after each write."""
        export.write_code(self._built, folder)
        write_shards(folder, self._weights, step=step)


def _float_bits(name: str) -> int:
    """Return the bits of the codes of the layout `name` if they are floats; 0 for integers or an unknown layout."""
    return LAYOUTS[name].bits if name in LAYOUTS and LAYOUTS[name].floats else 0


def _list_states(node: Node) -> tuple[StateSpec, ...]:
    """Return the specs of `node`'s caches, else of its states; a cache that rolls has growth WINDOW and fewer slots."""
    room = find_rolling_capacity(node)
    if room is None:
        return find_caches(node) or find_states(node)
    return tuple(replace(s, growth=Growth.WINDOW, type=s.type.with_axis(2, room[0])) for s in find_caches(node))
