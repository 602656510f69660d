"""genai_config.json: what onnxruntime-genai needs to know of a decoder folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.ir.graph import Graph

from ..targets import Target


def cache_layers(graph: Graph) -> list[dict[str, Any]]:
    """Geometry of the KV cache, a record per layer, read from the graph inputs."""
    found = []
    for i in range(len(graph.inputs)):
        value = graph.inputs.get(f"past_key_values.{i}.key")
        if value is None:
            break
        (node, _), *_ = value.uses
        window = node.attrs["window"]
        found.append({"layer": i, "kv_heads": value.shape[1], "head_dim": value.shape[3], "window": window})
    return found


def config(graph: Graph, target: Target, max_length: int, capture: bool = True) -> dict[str, Any]:
    """The configuration of a decoder graph with a KV cache, of the generic type ``decoder``.

    `capture`: decoding may be captured as a CUDA graph, on targets that have them.
    """
    meta, layers = graph.meta, cache_layers(graph)
    attention = next(n for n in graph.nodes if n.op.name == "attention")
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


def write_config(graph: Graph, target: Target, max_length: int, folder: Path, capture: bool = True) -> None:
    """Write genai_config.json into `folder`."""
    text = json.dumps(config(graph, target, max_length, capture), indent=2)
    (folder / "genai_config.json").write_text(text + "\n", encoding="utf-8")
