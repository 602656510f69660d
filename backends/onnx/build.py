"""Build folders for ONNX Runtime: ONNX models, and the configuration of onnxruntime-genai."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.ir import ops
from weft.ir.graph import Graph
from weft.ir.recipes.blocks import in_bytes
from weft.ir.recipes.readers import switched
from weft.ir.types import dtypes
from weft.passes import Trace
from weft.passes.analysis.states import has_cache, max_source
from weft.passes.encoder_decoder import split_encoder

from ..blocks import is_quantized
from ..options import ARITHMETIC, KEEP_BLOCKS, no_effect
from ..targets import Backend
from ..weights import weight_facts
from . import cuda, export, genai
from .lowerings import experts
from .lowerings import kept as blocks


class OnnxFolder:
    """The models of `graph` for `target` and texts of `length` tokens, not written yet; `notes` are added to.

    Raises:
        WeftError: naming an op that no lowering takes.
    """

    def __init__(self, graph: Graph, target: Backend, length: int, notes: list[str], *, prepack: bool = False) -> None:
        self._graph, self._target, self._length, self._prepack = graph, target, length, prepack
        if target.device == "cpu":
            _integers_for_floats(graph)
        if graph.meta.get("kind") == "encoder":
            _widen_outputs(graph)
        self._for_genai = genai.with_whole_caches(graph) if _suits_genai(graph, notes) else None
        trace = Trace()
        self._models = _lowered(graph, self._for_genai, target, length, notes, trace)
        models = self._models.values()
        self._stray = [s for b in models for s in cuda.cuda_problems(b.model)] if target.device == "cuda" else []
        self.trace = [*trace.lines, *(line for b in models for line in b.trace), *self._stray]
        self.weight_bytes = export.weight_bytes(models)
        self.tensors = export.stored_tensors(models)
        asked, kept = graph.meta.get(KEEP_BLOCKS, ""), blocks.summary(graph, target)
        self.idle = blocks.idle(graph, target)
        notes += blocks.given_up(graph, target)
        self.facts: dict[str, Any] = {
            "prepacked": prepack,
            "kept_blocks": asked if kept else "",
            "weights": weight_facts(graph, self.tensors),
        }
        if (tensors := switched(graph.reader)) is not None:
            self.facts["adapters"] = {name: f"{name}{export.ADAPTER}" for name in tensors.choices}
        if kept:
            self.facts["blocks"] = kept
            if ARITHMETIC not in graph.meta and blocks.rounds_activations(graph, target):
                self.facts["arithmetic"] = "int8"

    def write(self, folder: Path, step: Callable[[int], None]) -> None:
        """Write everything into `folder`; `step` is told the bytes just written."""
        export.write(self._models, folder, step)
        if self._prepack:
            from . import packing

            if not sum(packing.prepack(folder, name) for name in self._models):
                raise no_effect("--prepack", "ONNX Runtime packs none of these weights on this CPU")
        export.write_adapters(self._models[export.MODEL], folder)
        if self._for_genai is not None:
            file = genai.MODEL if genai.MODEL in self._models else export.MODEL
            genai.write_config(self._for_genai, self._target, self._length, folder, not self._stray, file)


def _integers_for_floats(graph: Graph) -> None:
    """Let weights that a pass made floats of 4 bits be integers of 8 bits that stand for the same: ONNX Runtime has no
    CPU kernel that reads FLOAT4E2M1."""
    for param in graph.params.values():
        if is_quantized(param):
            param.recipe = in_bytes(param.recipe, graph.reader)


def _suits_genai(graph: Graph, notes: list[str]) -> bool:
    """Return whether onnxruntime-genai runs `graph`; `notes` gets the reason if a user might expect it to."""
    kind, reason = graph.meta.get("kind"), None
    if kind in ("decoder", "encoder-decoder") and not has_cache(graph):
        notes.append("the pipeline gives the model no cache (kv-cache): weft run and onnxruntime-genai need one")
        return False
    if kind == "decoder" and (reason := genai.refusal(graph)) is not None:
        notes.append(f"onnxruntime-genai cannot run this model: {reason}")
    return kind == "decoder" and reason is None


def _lowered(
    graph: Graph, for_genai: Graph | None, target: Backend, length: int, notes: list[str], trace: Trace
) -> dict[str, export.Built]:
    """The ONNX models of `graph` by file name: one, or the halves of an encoder-decoder; and `for_genai`, if it is
    another."""
    # Clones: `legalize` rewrites in place, and genai_config.json is written from the graph before it.
    parts = {export.MODEL: graph.clone()}
    if for_genai is not None and for_genai is not graph:
        parts[genai.MODEL] = for_genai.clone()
    if graph.meta.get("kind") == "encoder-decoder":
        _leave_out_losses(graph, notes)
        parts[export.ENCODER], parts[export.MODEL] = split_encoder(graph)
    for part in parts.values():
        if any(experts.wrong_choices(node, target) for node in part.nodes):
            notes.append(f"{experts.WRONG_CHOICES}, so it is left out: with --dtype f16 experts are faster")
        target.legalize(part, trace)
    # Position tables of the encoder must cover the longest source, which may be longer than any answer.
    lengths = {export.ENCODER: max_source(graph, length)}
    return {name: export.build(part, target, lengths.get(name, length)) for name, part in parts.items()}


def _widen_outputs(graph: Graph) -> None:
    """Hand embeddings out in f32 where the model computes in bf16, which numpy does not know."""
    for name, value in list(graph.outputs.items()):
        if value.type.dtype == dtypes.bf16:
            graph.outputs[name] = ops.cast(value, to=dtypes.f32, name=name)


def _leave_out_losses(graph: Graph, notes: list[str]) -> None:
    """Drop the outputs that are neither logits nor caches: both halves of an encoder-decoder would add to them."""
    for name in [n for n in graph.outputs if n != "logits" and not n.startswith("present")]:
        del graph.outputs[name]
        notes.append(f"the output {name} is left out: it sums over encoder and decoder, which run apart")
