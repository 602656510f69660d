"""The sides of a bisection: names and objects as models that tokenize and can be traced."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from weft.backends.alignment.traces import Constant, Operation, ValueTrace
from weft.backends.runtime import load
from weft.backends.runtime.compiled_folder import GENAI, MANIFEST, read_facts, read_manifest
from weft.backends.runtime.text.tokenizer import Tokenizer
from weft.backends.target import TARGETS
from weft.ir import interpret, ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Param
from weft.ir.interpreter import bind_inputs, run_node, widen
from weft.ir.recipes.readers import Array
from weft.ir.storage import scratch_folder
from weft.ir.storage.documents import expand_home

from ....formats.weft.model_folder import GRAPH
from ....model import Model
from ..source.sources import load_source
from ..verify.internals import make_inputs
from ..verify.transformers_reference import load_transformers
from .onnx_trace import optimize, trace_onnx

PREFIXES = "transformers:FOLDER, torch:SOURCE, optimized:FOLDER, optimized:FILE.onnx, llama.cpp:FILE.gguf"
INPUTS = {"input_ids", "position_ids", "encoder_input_ids"}  # of PyTorch modules, and all without a default
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class BisectionSide:
    """A model that can be traced.

    run: trace on token ids (the decoder's) and the ids that an encoder before it reads, or []; it reports progress.
    detail: kind of its operations: 0 nodes of a graph, 1 nodes of ONNX, 2 ATen operations, 3 unknown (outputs only).
    tokens: the source or folder that has the tokenizer. vocab: number of tokens, 0 if unknown.
    """

    description: str
    run: Callable[[Sequence[int], Sequence[int], Step], ValueTrace]
    detail: int
    tokens: Model | Path | None = None
    vocab: int = 0
    has_encoder: bool = False

    def encode(self, text: str) -> list[int] | None:
        """Return the token ids of `text`; None without a tokenizer."""
        if isinstance(self.tokens, Model):
            tokenize = self.tokens.graph.tokenize if self.tokens.tokenizer is not None else None
            return None if tokenize is None else list(tokenize([text])[0])
        if self.tokens is None or not (self.tokens / "tokenizer.json").is_file():
            return None
        return Tokenizer(self.tokens).encode(text)


def open_side(side: Any, stack: ExitStack, trust: bool) -> BisectionSide:
    """Open a side: a prefix and a name, an ONNX file, a compiled folder, a source, or in Python a PyTorch module.

    Temporary files of the side are deleted when `stack` closes. Raise WeftError if it cannot be read, its prefix is
    unknown, or it would run code without `trust`.
    """
    prefix, name = split_prefix(side)
    path = expand_home(name) if isinstance(name, (str, Path)) else Path()
    is_compiled = any((path / n).is_file() for n in (MANIFEST, GENAI)) and not (path / GRAPH).is_file()
    facts = read_facts(path) if is_compiled and path != Path() else None
    if hasattr(side, "named_modules"):
        return _open_module(side, type(side).__name__)
    if prefix == "transformers":
        module = load_transformers(path, "AutoModel", f"{prefix}:", own_kind=True)
        return _open_module(module, f"transformers on {name}", path)
    if prefix in ("", "optimized") and (
        path.suffix == ".onnx" or (facts is not None and not TARGETS[facts.target].is_code)
    ):
        rounds = read_manifest(path).choice("arithmetic", ("", "int8"), "") == "int8"
        files = [path] if facts is None else facts.files[::-1]  # an encoder runs before its decoder

        def run_files(ids: Sequence[int], source: Sequence[int], step: Step) -> ValueTrace:
            parts = optimize(files, stack.enter_context(scratch_folder())) if prefix else files
            trace = trace_onnx(parts, ids, source, facts.head_dim if facts else None)
            trace.rounded = rounds
            return trace

        return BisectionSide(str(side), run_files, 1, files[0].parent, facts.vocab if facts else 0, len(files) > 1)
    if prefix == "optimized":
        raise WeftError(f"{side}: {name} is neither an ONNX file nor a compiled folder with ONNX models")
    if facts is not None and not prefix:
        loaded: Any = load(path, "cpu", trust=trust)
        module = getattr(loaded, "decoder", loaded).model
        return _open_module(module, str(side), path, facts.outputs or ["logits"], facts.vocab)
    model = load_source(name)
    model.notices()  # raises an error for missing parts that change the outputs
    graph, vocab = model.graph, model.graph.meta.get("vocab") or 0
    if prefix == "llama.cpp":
        return BisectionSide(f"llama.cpp on {name}", partial(trace_log_probabilities, path, graph), 3, model, vocab)
    if prefix == "torch":
        from ..modules import torch

        return _open_module(torch(model), f"PyTorch on {name}", model, list(graph.outputs), vocab)

    def run_graph(ids: Sequence[int], source: Sequence[int], step: Step) -> ValueTrace:
        return trace_graph(graph, make_inputs(graph.inputs, ids, source), step)

    return BisectionSide(model.description, run_graph, 0, model, vocab, "encoder_input_ids" in graph.inputs)


def split_prefix(side: Any) -> tuple[str, Any]:
    """Return (prefix, rest) of "transformers:folder"; ("", side) without a prefix. Raise WeftError if it is unknown."""
    match = re.fullmatch(r"([A-Za-z][\w.-]+):(.+)", side) if isinstance(side, str) else None
    if match is None or match[1].endswith(".py") or Path(side).exists():
        return "", side
    if f"{match[1]}:" not in PREFIXES:
        raise WeftError(f"{side}: the prefix {match[1]}: is unknown; known are {PREFIXES}")
    return match[1], match[2]


def _open_module(
    module: Any, name: str, tokens: Model | Path | None = None, outputs: Sequence[str] = ("logits",), vocab: int = 0
) -> BisectionSide:
    from .torch_trace import trace_module

    parameters, config = inspect.signature(module.forward).parameters, getattr(module, "config", None)
    required = {n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    # Classes of transformers choose positions themselves: RoBERTa begins after the id of the padding.
    names = [n for n in parameters if n in required or (n in INPUTS and (n != "position_ids" or config is None))]
    is_theirs = bool(getattr(config, "is_encoder_decoder", False))  # a class of transformers

    def run(ids: Sequence[int], source: Sequence[int], step: Step) -> ValueTrace:
        inputs = make_inputs(names, source if is_theirs else ids, source)
        if is_theirs:
            inputs["decoder_input_ids"] = make_inputs(["input_ids"], ids)["input_ids"]
        return trace_module(module, inputs, outputs, **({"use_cache": False} if "use_cache" in parameters else {}))

    has_encoder = is_theirs or "encoder_input_ids" in parameters
    return BisectionSide(name, run, 2, tokens, getattr(config, "vocab_size", vocab), has_encoder)


def trace_graph(
    graph: Graph, inputs: Mapping[str, Array], step: Callable[[int, int], None] | None = None
) -> ValueTrace:
    """Return the trace of `graph` on `inputs`; `step` is called with the number of nodes that have run, and of all.

    Its labels are the modules of the checkpoint whose weights a node reads.
    """
    binding = bind_inputs(graph, {name: x.shape for name, x in inputs.items()})
    constants: dict[str, Constant] = {
        p.name: (p.type.concrete({}), partial(_load, p, graph)) for p in graph.params.values()
    }
    trace = ValueTrace(values={name: widen(x) for name, x in inputs.items()}, constants=constants, dtype="f64")

    def watch(node: Node, results: tuple[Array, ...]) -> None:
        reads, makes = (tuple("" if v is None else v.name for v in vs) for vs in (node.inputs, node.outputs))
        trace.values.update(zip(makes, results, strict=True))
        run = partial(_run, node, binding)
        trace.operations.append(Operation(node.op.name, makes[0], reads, makes, node.attrs, run))
        keys = {key for v in node.inputs if isinstance(v, Param) for key in v.recipe.sources()}
        if len(modules := {key.rpartition(".")[0] for key in keys}) == 1:
            trace.labels.setdefault(modules.pop(), makes[0])
        if step:
            step(len(trace.operations), len(graph))

    interpret(graph, inputs, watch=watch)
    trace.outputs = {name: v.name for name, v in graph.outputs.items() if v.name in trace.values}
    return trace


def _run(node: Node, binding: Mapping[str, int], operands: list[Array | None], attrs: Mapping[str, Any]) -> list[Array]:
    return [widen(x) for x in run_node(node.op, operands, attrs, binding)]


def _load(param: Param, graph: Graph) -> Array:
    return widen(param.recipe.evaluate(graph.reader))


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
