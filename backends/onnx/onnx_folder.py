"""Build folders for ONNX Runtime: ONNX models, and the configuration of onnxruntime-genai."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.ir.graph import Graph
from weft.ir.op import Growth, StateKind, Trait
from weft.ir.recipes.readers import find_switched_tensors
from weft.passes.analysis.states import (
    EMBEDDED,
    find_state_inputs,
    has_cache,
    limit_source,
    make_cache_records,
    make_state_records,
)

from ..options import ARITHMETIC, KEEP_BLOCKS, Options, make_no_effect_error
from ..target import MODEL, Backend
from ..weights import summarize_weights
from . import export
from .lowerings import kept as kept_blocks
from .lowerings import moe as experts

GENAI_MODEL = "genai.onnx"  # a second model with full caches, next to one with rolling caches; they share the weights
FILES = {  # the file of each form
    **{MODEL: export.MODEL, "decoder": export.MODEL, "encoder": export.ENCODER},
    f"genai-{MODEL}": GENAI_MODEL,
}
GENAI = "genai"  # the form for onnxruntime-genai, where it cannot run the main one


class OnnxFolder:
    """The ONNX models of a compilation, not written yet, for `target` and sequences of up to `length` tokens. `forms`
    maps keys of `FILES` to the graphs of these files, "" to the graph before lowering, and GENAI to its copy with full
    caches if onnxruntime-genai needs one. The constructor appends notes for the user to `notes`. Raises WeftError if no
    lowering accepts a node, or the target's opset lacks an operator."""

    def __init__(
        self, forms: Mapping[str, Graph], target: Backend, length: int, options: Options, notes: list[str]
    ) -> None:
        graph, self._target, self._length = forms[""], target, length
        self._prepack, asked = getattr(options, "prepack", False), getattr(options, KEEP_BLOCKS, "")
        notes += self.list_notes(graph)
        self._for_genai = forms.get(GENAI, graph) if can_run_genai(graph) else None
        if any(experts.has_bf16_router_bug(node, target) for node in graph.nodes):
            notes.append(f"{experts.BF16_ROUTER_BUG}, so it is left out: with --dtype f16 experts are faster")
        # Position tables of the encoder must cover the longest source, which may exceed `length`.
        lengths = {"encoder": limit_source(graph, length)}
        states = [*find_state_inputs(graph)]
        self._models = {
            self.name_file(form): export.build_model(
                forms[form], target, lengths.get(form, length), states, self.list_omitted(forms[form])
            )
            for form in FILES
            if form in forms
        }
        models = self._models.values()
        captured = models if target.device == "cuda" else ()
        self._uncapturable = [s for b in captured for s in export.list_uncapturable(b.model)]
        self.trace = [*(line for b in models for line in b.trace), *self._uncapturable]
        self.weight_bytes = export.count_weight_bytes(models)
        self.tensors = export.list_stored_tensors(models)
        block_counts = kept_blocks.count_layouts(graph, target)
        self.idle = kept_blocks.list_idle_options(graph, target, options)
        if not any(spec.growth in (Growth.TEXT, Growth.WINDOW) for spec, _, _ in states):
            self.idle["cache"] = f"{graph.name} has no cache"
        notes += kept_blocks.report_dequantized(graph, target)
        self.facts: dict[str, Any] = {
            "prepacked": self._prepack,
            "kept_blocks": asked if block_counts else "",
            "weights": summarize_weights(graph, self.tensors),
            **({"opset": target.opset} if target.opset < type(target).opset else {}),
        }
        if (tensors := find_switched_tensors(graph.reader)) is not None:
            self.facts["adapters"] = {name: f"{name}{export.ADAPTER}" for name in tensors.choices}
        if block_counts:
            self.facts["blocks"] = block_counts
            if not getattr(options, ARITHMETIC, "") and kept_blocks.has_rounded_activations(graph, target):
                self.facts["arithmetic"] = "int8"

    def name_file(self, form: str) -> str:
        """Return the path of the model of `form` in the folder."""
        return FILES[form]

    def list_omitted(self, graph: Graph) -> tuple[str, ...]:
        """Return the inputs of `graph` that its model does not have; see `OnnxEmitter`."""
        return ()

    def list_notes(self, graph: Graph) -> list[str]:
        """Return a list with a note if `graph` is a decoder or encoder-decoder without a KV cache, or a decoder that
        onnxruntime-genai cannot run; else []."""
        kind = graph.meta.get("kind")
        if kind in ("decoder", "encoder-decoder") and not has_cache(graph):
            return ["the model has no KV cache, which weft run and onnxruntime-genai need: add kv-cache to --passes"]
        reason = find_genai_refusal(graph) if kind == "decoder" else None
        return [] if reason is None else [f"onnxruntime-genai cannot run this model: {reason}"]

    def write(self, folder: Path, step: Callable[[int], None]) -> None:
        """Write the models, adapters and configuration into `folder`; call `step` with the number of bytes of each
        write of weights. Raises errors of `export`, and WeftError if prepacking was requested but packs nothing."""
        export.write_models(self._models, folder, step)
        if self._prepack:
            from . import prepacking as packing

            if not sum(packing.prepack(folder, name) for name in self._models):
                raise make_no_effect_error("--prepack", "ONNX Runtime packs none of these weights on this CPU")
        export.write_adapters(self._models[export.MODEL], folder)
        if self._for_genai is not None:
            file = GENAI_MODEL if GENAI_MODEL in self._models else export.MODEL
            config = build_config(self._for_genai, self._target, self._length, not self._uncapturable, file)
            (folder / "genai_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def can_run_genai(graph: Graph) -> bool:
    """Return whether onnxruntime-genai can run `graph`, once its rolling caches are replaced by full caches."""
    return graph.meta.get("kind") == "decoder" and has_cache(graph) and find_genai_refusal(graph) is None


def find_genai_refusal(graph: Graph) -> str | None:
    """Return why onnxruntime-genai cannot run the decoder `graph`; None if it can. Rolling caches do not count: the
    caller replaces them by full ones."""
    if EMBEDDED in graph.inputs:
        return "it takes embeddings of tokens, not their ids"
    states = list(find_state_inputs(graph))
    if not states:
        return "it has no caches"
    if make_state_records(states):
        return "it supports recurrent states of a few model types only"
    if any(spec.kind is StateKind.INDEX for spec, _, _ in states):
        return "it has no caches for the keys of a lightning index"
    if any(layer["latent"] for layer in make_cache_records(states)):
        return "it has no latent caches"
    keys, values = ([spec.type.shape[3] for spec, _, _ in states if spec.part == part] for part in ("key", "value"))
    return None if keys == values else "it requires keys and values of equal width"


def build_config(
    graph: Graph, target: Backend, max_length: int, capture: bool = True, filename: str = "model.onnx"
) -> dict[str, Any]:
    """Return the content of genai_config.json, of model type ``decoder``, for a decoder `graph` with KV caches.
    `capture`: on a CUDA target, decoding may be captured as a CUDA graph. `filename` is the file of the ONNX model."""
    meta, layers = graph.meta, make_cache_records(find_state_inputs(graph))
    attention = next(n for n in graph.nodes if Trait.ATTENTION in n.op.traits)
    cuda = {"cuda": {"enable_cuda_graph": str(int(capture))}}
    inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    if "position_ids" in graph.inputs:
        inputs["position_ids"] = "position_ids"
    stop = meta.get("eos_token_ids") or []
    model: dict[str, Any] = {
        "type": "decoder",
        "vocab_size": meta["vocab"],
        "context_length": max_length,
        "eos_token_id": stop[0] if len(stop) == 1 else stop,
        "bos_token_id": meta.get("bos_token_id"),
        "pad_token_id": meta.get("pad_token_id", stop[0] if stop else 0),
        "decoder": {
            "filename": filename,
            "head_size": layers[0]["head_dim"],
            "num_key_value_heads": layers[0]["kv_heads"],
            "num_hidden_layers": len(layers),
            "num_attention_heads": attention.attrs["heads"],
            "hidden_size": attention.output.width,
            "session_options": {"provider_options": [cuda] if target.device == "cuda" else []},
            "inputs": inputs
            | {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"},
            "outputs": {
                "logits": "logits",
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
        },
    }
    model = {k: v for k, v in model.items() if v is not None and v != []}
    grows = any(spec.growth is Growth.APPEND for spec, _, _ in find_state_inputs(graph))
    search = {"max_length": max_length, "past_present_share_buffer": not grows, "do_sample": False}
    return {"model": model, "search": search}
