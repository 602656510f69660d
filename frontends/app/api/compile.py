"""`weft.compile`: a source becomes a folder of ONNX models or of readable PyTorch, which weft's runtime also runs."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from weft.backends import DEFAULT_TARGET
from weft.backends.options import CACHE_DTYPE, OptionKeywords, Options, make_no_effect_error
from weft.backends.safetensors import Progress
from weft.backends.target import TARGETS, Backend, CompiledModel, Variant
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.graph.verifier import verify as verify_graph
from weft.ir.storage import MANIFEST, check_replaceable, replace_folder, write_manifest
from weft.ir.storage.documents import expand_home
from weft.passes import Report, lookup, run_passes
from weft.passes.analysis.states import find_caches
from weft.passes.core.resume import choose_store, remove_results
from weft.passes.forms import derive_graphs
from weft.passes.library.target.rope_length import RopeLength

from ...formats.weft.manifest import build_manifest, hash_files
from ...model import Model, SourceLike
from ...models.families import FAMILIES
from .rewrite import resolve_pipeline
from .source.sources import load_source
from .weights import expand_weights

MAX_LENGTH = 4096  # if neither the model nor the user states a length
LONGEST = 1 << 24  # tokens: above it, tables of positions would take gigabytes


@dataclass
class CompileReport:
    """The result of `compile`.

    graph: after the passes. seconds: keyed by stage (load, passes, write). trace: refused lowerings, with reasons.
    notes: remarks for the user.
    explain: a function that returns the lines of ``--explain``, [] for targets without that option.
    """

    folder: Path
    target: str
    dtype: str
    model: Model
    graph: Graph
    passes: Report
    weight_bytes: int
    seconds: dict[str, float]
    trace: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    explain: Callable[[], list[str]] = field(default=list, repr=False)


def compile(
    source: SourceLike,
    out: str | Path,
    *,
    target: str = DEFAULT_TARGET,
    dtype: str | None = None,
    passes: str = "default",
    weights: str | None = None,
    max_length: int | None = None,
    seed: int | None = None,
    dump_ir: str | Path | None = None,
    verify: bool = False,
    adapters: Sequence[str | Path] = (),
    switch_adapters: Sequence[str | Path] = (),
    family: str | None = None,
    without: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    **options: Unpack[OptionKeywords],
) -> CompileReport:
    """Compile `source` (anything that `load_source` accepts, a module, or a graph) into the folder `out`.

    Args:
        target: ``ort-cpu``, ``ort-cuda``, ``onnx``, ``torch``, ``transformers``, or a target that a plugin adds.
        dtype: float dtype of weights and activations; if None, the first that the target supports.
        passes: pipeline as a string, or ``@path`` of a file with one; ``default,-last-token-logits`` keeps the logits
            of all positions.
        weights: quantization of the weights, such as ``int4`` or ``int8``: a short name for passes that run before
            `passes`. Arguments of the pass `quantize` may follow in braces: ``int4{method=rtn}``.
        max_length: positions that tables and caches can store; if None, the model's context, or 4096 if it has none.
        seed: of the random initialization, for sources without a checkpoint; 0 if None.
        dump_ir: folder for the text form of the graph before the first and after every pass.
        verify: check every pass on small random inputs in float64.
        adapters: folders of PEFT adapters to merge into the weights, in this order.
        switch_adapters: folders of LoRA adapters to store next to the model as NAME.onnx_adapter: ONNX Runtime and
            onnxruntime-genai select one of them, or none, at run time.
        family: family of a Hugging Face folder, instead of the one that its config names.
        without: names of parts of the source to leave out, although the model's outputs then change.
        files: contents of further files to write, by file name.
        progress: called with (name of a pass, done, total), later with ("weights", bytes written, total bytes).
        options: the target's options, as listed by `weft targets NAME`, among them
            ``prepack=True``: also store the weights in the CPU's packed layout (``ort-cpu``; doubles the disk space);
            ``keep_blocks="head"`` or ``"all"``: multiply the output head, or every linear layer, by quantized blocks
            of the source where a kernel computes them exactly (``ort-cpu``, ``torch``);
            ``cache_dtype="int8"``: store keys and values as integers (int8, int4; ``torch`` also fp8);
            ``activations="fp8"``: above 64 tokens, also round activations to FP8 before FP8 blocks (``torch``).

    Raises:
        WeftError: on any bad input; an older folder `out` then survives.
    """
    clock = {"start": time.perf_counter()}
    progress = progress or (lambda stage, done, total: None)
    backend = TARGETS.lookup(target)
    selected = backend.choose(options)
    backend = backend.specialize(selected)
    variants = [v._replace(dtype=v.target.dtype(v.dtype)) for v in backend.list_variants(selected, dtype, weights)]
    model = load_source(source, seed, adapters, family, without)
    if switch_adapters:
        model = _add_slots(model, backend, switch_adapters)
    passes = resolve_pipeline(passes)
    check_replaceable(Path(out), model.files)  # before long work
    notes = model.notices()
    verify_graph(model.graph, recipes=True)
    length = _choose_length(model.graph, max_length, notes)
    if (cache_dtype := getattr(selected, CACHE_DTYPE, "")) and not any(map(find_caches, model.graph.nodes)):
        raise make_no_effect_error(f"--cache-dtype {cache_dtype}", f"no attention of {model.graph.name} has a cache")
    clock["load"] = time.perf_counter()
    built: list[_BuiltVariant] = []
    store = choose_store(out)
    for variant in variants:
        name = f"{variant.dtype}-{variant.weights}"
        steps = Path(dump_ir, name) if dump_ir and len(variants) > 1 else dump_ir
        built.append(_build(variant, model.graph, passes, selected, length, notes, verify, steps, progress, store))
    main = built[0]
    _check_length(main.graph, length, max_length is None, notes)
    if backend.own_code:
        _note_family(model, notes)
    clock["passes"] = time.perf_counter()
    done, total = 0, sum(b.model.weight_bytes for b in built)

    def step(written: int) -> None:
        nonlocal done
        done += written
        progress("weights", done, total)

    with replace_folder(Path(out), model.files) as folder, hash_files(model) as hashes:
        if model.tokenizer is not None:  # first: it may be refused
            model.tokenizer(folder)
        for each in built:
            each.model.write(folder, step)
        for name, text in (files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        manifest = build_manifest(main.graph, backend, main.dtype, length, main.pipeline, model, hashes())
        manifest["passes"] = [*model.passes, *(record.json() for record in main.report.records)]
        write_manifest(folder, MANIFEST, manifest | main.model.facts)
    remove_results(store)
    clock["write"] = time.perf_counter()
    seconds = {name: end - start for (_, start), (name, end) in itertools.pairwise(clock.items())}
    explain = partial(getattr(main.model, "explain", lambda report: []), main.report)
    trace = [line for each in built for line in each.model.trace]
    notes = list(dict.fromkeys(notes))  # variants repeat them
    return CompileReport(
        Path(out), target, main.dtype, model, main.graph, main.report, total, seconds, trace, notes, explain
    )


@dataclass(frozen=True)
class _BuiltVariant:
    """A variant that is not written yet, with the graph after its passes and the report of these."""

    model: CompiledModel
    dtype: str
    graph: Graph
    pipeline: str
    report: Report


def _build(
    variant: Variant,
    graph: Graph,
    passes: str,
    selected: Options,
    length: int,
    notes: list[str],
    verify: bool,
    dump_ir: str | Path | None,
    progress: Progress,
    store: Path,
) -> _BuiltVariant:
    """Run the passes of `variant` on a copy of `graph`, and lower it; append notes for the user to `notes`."""
    target, dtype, report = variant.target, str(variant.dtype), Report()
    first = "" if variant.weights is None else expand_weights(graph, variant.weights)
    text = ", ".join(filter(None, (first, passes, *selected.passes().values())))
    pipeline = target.pipeline(graph, dtype, text, length)
    graph = run_passes(graph, pipeline, verify=verify, dump=dump_ir, report=report, progress=progress, store=store)
    forms = derive_graphs(graph, target.forms(graph, selected), verify=verify, dump=dump_ir, report=report)
    notes += (line for record in report.records for line in record.warnings)
    model = target.build(forms, dtype, length, selected, notes)
    _check_effect(selected, variant.weights, report, getattr(model, "idle", {}))
    return _BuiltVariant(model, dtype, graph, str(pipeline), report)


def _check_effect(selected: Options, weights: str | None, report: Report, idle: Mapping[str, str]) -> None:
    """Raise WeftError if quantization by `weights` or an option in `selected` changed nothing.

    `report` states why a pass changed nothing. `idle` maps each further option without effect to the reason.
    """
    first = {record.applied.name: record.idle for record in reversed(report.records)}
    if weights is not None and (reason := first[lookup("quantize").name]):
        raise make_no_effect_error(f"--weights {weights}", reason)
    if cache_reason := first.get(selected.passes().get(CACHE_DTYPE, "").partition("{")[0]):
        idle = {**idle, CACHE_DTYPE: cache_reason}
    for name, option in selected.list_all().items():
        if name in idle and (value := getattr(selected, name)) != option.default:
            raise make_no_effect_error(f"{option.flag} {value}", idle[name])


def _note_family(model: Model, notes: list[str]) -> None:
    """Append a note if transformers supports the family of `model`, which only exact passes have rewritten so far."""
    family = FAMILIES.get(str(model.graph.meta.get("model_type")))
    if family is not None and family.transformers and model.settings is not None:
        name = family.model_types[0]
        notes.append(
            f"transformers supports this architecture: `weft export` writes a folder that loads as {name}, without code"
        )


def _add_slots(model: Model, backend: Backend, adapters: Sequence[str | Path]) -> Model:
    """Return a copy of `model` with slots for LoRA factors: one of `adapters`, or none, fills them at run time."""
    from ...formats.hf.slots import add_slots

    if not backend.opset:
        raise WeftError(f"--switch-adapter needs a target that ONNX Runtime runs, not {backend.name}")
    if model.graph.meta.get("kind") == "encoder-decoder":
        raise WeftError(f"{model.description} is an encoder-decoder, so use --adapter instead of --switch-adapter")
    graph = model.graph.clone()
    # The last folder name names the adapter; abspath resolves "." and "..".
    add_slots(graph, model.description, [Path(os.path.abspath(expand_home(adapter))) for adapter in adapters])
    return replace(model, graph=graph)


def _choose_length(graph: Graph, requested: int | None, notes: list[str]) -> int:
    context = graph.meta.get("context")
    if requested is None:
        if context is None and "input_ids" in graph.inputs:
            notes.append(f"the model states no context length: compiled for {MAX_LENGTH} tokens (see --max-length)")
    elif requested < 1:
        raise WeftError(f"--max-length is {requested}, but it must be positive")
    elif (kind := graph.meta.get("kind")) in ("image-encoder", "audio-encoder"):
        raise make_no_effect_error(f"--max-length {requested}", f"it counts tokens, and {graph.name} is an {kind}")
    if (length := int(requested or context or MAX_LENGTH)) > LONGEST:
        raise WeftError(f"a length of {length:,} tokens is more than {LONGEST:,}: choose a smaller --max-length")
    return length


def _check_length(graph: Graph, length: int, default: bool, notes: list[str]) -> None:
    """Raise WeftError if `length` exceeds the number of learned positions of the rewritten `graph`.

    Append a note if `length` exceeds the graph's context, unless `notes` has one of the pass rope-length. Append a note
    if `length` is a `default` and passes have extended the context beyond it.
    """
    table = graph.meta.get("max_positions")  # the rows of learned positions
    if table is not None and length > table:
        raise WeftError(f"--max-length {length} exceeds the model's {table} learned positions: choose at most {table}")
    context = graph.meta.get("context") or length
    if default and context > length:
        notes.append(f"passes extend the context to {context} tokens, but the length is {length}: raise --max-length")
    if length > context and not any(line.startswith(f"{RopeLength.name}: ") for line in notes):
        notes.append(
            f"the model states a context of {context:,} tokens: beyond it, up to the --max-length {length:,}, answers "
            "are likely to be worse (the pass extend-context may help)"
        )
