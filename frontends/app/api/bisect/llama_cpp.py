"""Traces of GGUF files by llama.cpp, which returns log-probabilities only."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.alignment.traces import ValueTrace
from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph

LOG_PROBABILITIES = "log_probabilities"  # of the token after the last one


def trace_log_probabilities(path: Path, graph: Graph, ids: Sequence[int], *_: Any) -> ValueTrace:
    """Return a trace with the only value `LOG_PROBABILITIES` [vocab] after the tokens `ids`. `graph`: of the file.

    Raises:
        WeftError: if xllamacpp is missing, or cannot run the file at `path`.
    """
    try:
        llama = importlib.import_module("xllamacpp")
    except ImportError as error:
        raise WeftError(f"llama.cpp: needs the package xllamacpp ({error}): pip install xllamacpp") from error
    params, vocab = llama.CommonParams(), graph.meta["vocab"]
    params.model.path, params.n_ctx, params.warmup, params.verbosity = str(path), len(ids) + 1, False, -1
    # By default, caches and attention are in f16.
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    request = {"prompt": list(ids), "temperature": 0, "max_tokens": 1, "logprobs": vocab, "cache_prompt": False}
    try:
        choice = llama.Server(params).handle_completions(request)["choices"][0]
        likely = {x["id"]: x["logprob"] for x in choice["logprobs"]["content"][0]["top_logprobs"]}
    except (RuntimeError, ValueError, KeyError) as error:
        raise WeftError(f"llama.cpp cannot run {path}: {error}") from error
    values = np.array([likely.get(i, -math.inf) for i in range(vocab)])
    # Its kernels round activations to 8 bits before products with quantized weights.
    rounded = any(graph.reader.dtype(key).is_block for p in graph.params.values() for key in p.recipe.sources())
    # It looks approximate GELUs up in a table with an entry per f16 (ggml-cpu/vec.h).
    tabulated = any(
        (node.op is ops.gelu and node.attrs["approximate"] != "none")
        or node.attrs.get("activation") in ("gelu_tanh", "gelu_quick")
        for node in graph.nodes
    )
    outputs, dtype = {LOG_PROBABILITIES: LOG_PROBABILITIES}, "f16" if tabulated else "f32"
    return ValueTrace(values={LOG_PROBABILITIES: values}, outputs=outputs, dtype=dtype, rounded=rounded)
