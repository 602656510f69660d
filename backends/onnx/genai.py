"""genai_config.json: the description of a decoder folder for onnxruntime-genai."""

from __future__ import annotations

from typing import Any

from weft.ir.graph import Graph
from weft.ir.op import Growth, StateKind, Trait
from weft.passes.analysis.states import EMBEDDED, find_state_inputs, make_cache_records, make_state_records

from ..target import Backend

MODEL = "genai.onnx"  # a second model with full caches, next to one with rolling caches; they share the weights


def find_refusal(graph: Graph) -> str | None:
    """Return why onnxruntime-genai cannot run the decoder `graph`; None if it can. Rolling caches do not count: the
    caller replaces them by full ones."""
    if EMBEDDED in graph.inputs:
        return "it takes embeddings of tokens, not their ids"
    states = list(find_state_inputs(graph))
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
