"""genai_config.json: what onnxruntime-genai needs to know of a decoder folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx_ir as onnx

from weft.ir.graph import Graph
from weft.ir.op import Trait
from weft.passes.analysis.states import cache_records, state_records, taken_states

from ..targets import Backend


def refusal(graph: Graph) -> str | None:
    """Return why onnxruntime-genai cannot run a graph with caches; None if it can, perhaps with some `cautions`."""
    carried = list(taken_states(graph))
    layers = cache_records(carried)
    if state_records(carried):
        return "its states of recurrences are those of a few model types only"
    if any(layer["latent"] for layer in layers):
        return "it has no latent caches"
    sizes = {layer["capacity"] for layer in layers if layer["rolling"]}
    if len(sizes) > 1:
        return f"its rolling caches are of one size, not of {' and '.join(map(str, sorted(sizes)))}"
    return None


def cautions(graph: Graph, model: onnx.Model) -> list[str]:
    """List the limits of onnxruntime-genai with the caches of `graph`, lowered to `model`, which it can run."""
    layers, limits = cache_records(taken_states(graph)), []
    if any("sliding_window_cache" in node.attributes for node in model.graph):
        limits.append(
            "onnxruntime-genai needs prompts of equal length for rolling caches: for other batches "
            'compile with -p "default, -rolling-buffer", or for target onnx'
        )
    if _sliding_window(layers):
        capacity = next(layer["capacity"] for layer in layers if layer["rolling"])
        limits.append(f"onnxruntime-genai needs a max_length of at least {capacity}, the size of its rolling caches")
    return limits


def _sliding_window(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The section that makes onnxruntime-genai allocate rolling caches beside others: window_size + cache_slack keys.

    Where all roll it reads their size from the graph. A slack of 0 would mean its default, so that one key of the
    window counts as slack where there is none.
    """
    rolling = [layer for layer in layers if layer["rolling"]]
    if not rolling or len(rolling) == len(layers):
        return {}
    capacity = rolling[0]["capacity"]
    window = min(max(layer["window"] for layer in rolling), capacity - 1)
    section = {"window_size": window, "cache_slack": capacity - window, "layers": [n["layer"] for n in rolling]}
    return {"sliding_window": {**section, "slide_key_value_cache": False, "slide_inputs": False}}


def config(graph: Graph, target: Backend, max_length: int, capture: bool = True) -> dict[str, Any]:
    """The configuration of a decoder graph with KV caches, before it is lowered, of the generic type ``decoder``.

    `capture`: decoding may be captured as a CUDA graph, on targets that have them.
    """
    meta, layers = graph.meta, cache_records(taken_states(graph))
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
            "filename": "model.onnx",
            "head_size": layers[0]["head_dim"],
            "num_key_value_heads": layers[0]["kv_heads"],
            "num_hidden_layers": len(layers),
            "num_attention_heads": attention.attrs["heads"],
            "hidden_size": attention.output.width,
            "session_options": {"provider_options": [cuda] if target.device == "cuda" else []},
            **_sliding_window(layers),
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
    search = {"max_length": max_length, "past_present_share_buffer": True, "do_sample": False}
    return {"model": model, "search": search}


def write_config(graph: Graph, target: Backend, max_length: int, folder: Path, capture: bool = True) -> None:
    """Write genai_config.json into `folder`."""
    text = json.dumps(config(graph, target, max_length, capture), indent=2)
    (folder / "genai_config.json").write_text(text + "\n", encoding="utf-8")
