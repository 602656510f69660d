"""Graphs written by hand, in folders as weft writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import weft

VOCAB, DIM, LONGEST = 12, 8, 6
MANIFEST = {"kind": "decoder", "target": "ort-cpu", "vocab": VOCAB, "max_length": LONGEST, "eos_token_ids": [1]}
Values = NDArray[np.float32]


def save(folder: Path, model: onnx.ModelProto, external: bool = False, **facts: Any) -> Path:
    options = {"save_as_external_data": True, "location": "model.onnx.data", "size_threshold": 0} if external else {}
    onnx.save(model, folder / "model.onnx", **options)
    (folder / "weft.json").write_text(json.dumps(MANIFEST | facts))
    return folder


def graph(nodes: Sequence[Any], inputs: dict[str, Any], outputs: dict[str, Any], *constants: Any) -> onnx.ModelProto:
    """Return a model; inputs are int64 and outputs float32 unless a pair gives another type."""

    def described(values: dict[str, Any], usual: int) -> list[onnx.ValueInfoProto]:
        pairs = {name: v if isinstance(v, tuple) else (usual, v) for name, v in values.items()}
        return [helper.make_tensor_value_info(name, *pair) for name, pair in pairs.items()]

    named = [numpy_helper.from_array(value, name) for name, value in constants]
    built = helper.make_graph(list(nodes), "g", described(inputs, 7), described(outputs, 1), named)
    return helper.make_model(built, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def encoder(tables: tuple[Values, Values], *, types: bool = True, output: str = "last_hidden_state") -> onnx.ModelProto:
    """Return an encoder: the vector of each token plus the mean of its row, so padding would change results."""
    node, size = helper.make_node, ["batch", "seq"]
    nodes = [
        node("Gather", ["words", "input_ids"], ["w"]),
        *([node("Gather", ["kinds", "token_type_ids"], ["k"]), node("Add", ["w", "k"], ["h"])] if types else []),
        node("Cast", ["attention_mask"], ["mask"], to=1),
        node("Unsqueeze", ["mask", "last"], ["column"]),
        node("Mul", ["h" if types else "w", "column"], ["kept"]),
        node("ReduceSum", ["kept", "one"], ["sum"]),
        node("ReduceSum", ["column", "one"], ["count"]),
        node("Div", ["sum", "count"], ["mean"]),
        node("Add", ["h" if types else "w", "mean"], [output]),
    ]
    inputs = dict.fromkeys(("input_ids", "attention_mask", *(["token_type_ids"] if types else [])), size)
    axes = [("last", np.array([2])), ("one", np.array([1]))]
    return graph(nodes, inputs, {output: [*size, DIM]}, ("words", tables[0]), ("kinds", tables[1]), *axes)


def opened(folder: Path, **options: Any) -> Any:
    return weft.load(folder, threads=1, **options)


def decoder(**changed: Any) -> onnx.ModelProto:
    """Return a decoder whose logits are a table and whose caches pass through; a change of None removes an input or
    output."""
    cache = (1, ["batch", 1, "capacity", 8])
    size = ["batch", "seq"]
    inputs = {"input_ids": size, "attention_mask": ["batch", "total"]}
    inputs |= {f"past_key_values.0.{part}": cache for part in ("key", "value")}
    outputs = {"logits": ["batch", "seq", VOCAB], "present.0.key": cache, "present.0.value": cache}
    inputs |= {name: value for name, value in changed.items() if name in inputs or name.startswith("extra")}
    outputs |= {name: value for name, value in changed.items() if name in outputs}
    inputs, outputs = ({k: v for k, v in some.items() if v is not None} for some in (inputs, outputs))
    source = {"logits": ["table", "input_ids"]}
    nodes = [helper.make_node("Gather", source[name], [name]) for name in outputs if name in source]
    for name in outputs:
        if name.startswith("present") and (past := name.replace("present", "past_key_values")) in inputs:
            nodes.append(helper.make_node("Identity", [past], [name]))
    width = outputs.get("logits", [VOCAB])[-1]
    table = np.random.default_rng(0).standard_normal((VOCAB, width)).astype(np.float32)
    return graph(nodes, inputs, outputs, ("table", table))
