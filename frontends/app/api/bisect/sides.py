"""The sides of a bisection: names and objects as models that tokenize and can be traced."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weft.backends.alignment.traces import ValueTrace
from weft.backends.runtime import load
from weft.backends.runtime.compiled_folder import GENAI, MANIFEST, read_facts, read_manifest
from weft.backends.runtime.text.tokenizer import Tokenizer
from weft.backends.target import TARGETS
from weft.ir.errors import WeftError
from weft.ir.storage import scratch_folder
from weft.ir.storage.documents import expand_home

from ....formats.weft.model_folder import GRAPH
from ....model import Model
from ..source.sources import load_source
from ..verify.internals import make_inputs
from ..verify.transformers_reference import load_transformers
from .graph_trace import trace_graph
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
        from .llama_cpp import trace_log_probabilities

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
    names = [n for n in parameters if n in INPUTS | required]
    is_theirs = bool(getattr(config, "is_encoder_decoder", False))  # a class of transformers

    def run(ids: Sequence[int], source: Sequence[int], step: Step) -> ValueTrace:
        inputs = make_inputs(names, source if is_theirs else ids, source)
        if is_theirs:
            inputs["decoder_input_ids"] = make_inputs(["input_ids"], ids)["input_ids"]
        return trace_module(module, inputs, outputs, **({"use_cache": False} if "use_cache" in parameters else {}))

    has_encoder = is_theirs or "encoder_input_ids" in parameters
    return BisectionSide(name, run, 2, tokens, getattr(config, "vocab_size", vocab), has_encoder)
