"""`weft.compile`: a source becomes a folder of ONNX models or of readable PyTorch, which weft's runtime runs too."""

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
from weft.backends.options import CACHE_DTYPE, OptionKeywords, Options, no_effect
from weft.backends.safetensors import Progress
from weft.backends.targets import TARGETS, Backend
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.graph.verifier import verify as verify_graph
from weft.ir.storage import MANIFEST, check_free, seal, whole_folder
from weft.ir.storage.documents import expanded
from weft.passes import Report, lookup, run_passes
from weft.passes.analysis.states import caches
from weft.passes.forms import make_forms
from weft.passes.library.target.rope_length import RopeLength

from ...formats.weft.manifest import hashing, record
from ...model import Model, SourceLike
from ...models.families import FAMILIES
from .rewriting import pipeline_text
from .source.sources import load_source
from .weights import weights_pipeline

MAX_LENGTH = 4096  # where neither the model nor the user says
LONGEST = 1 << 24  # tokens: tables of positions take gigabytes beyond


@dataclass
class CompileReport:
    """Result of `compile`: the folder, the time, the passes.

    `trace` tells which lowerings refused and why; `notes` are what a user should know; `explain` makes the lines of a
    target that explains what it built.
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
    progress: Progress | None = None,
    **options: Unpack[OptionKeywords],
) -> CompileReport:
    """Compile `source` (whatever `load_source` takes, a module, or a graph) into the folder `out`.

    Args:
        target: ``ort-cpu``, ``ort-cuda``, ``onnx`` or ``torch``, or one that a plugin adds.
        dtype: float type of weights and activations; the first of the target's if None.
        passes: pipeline text, or ``@path`` of a file that holds it; ``default,-last-token-logits`` keeps the logits of
            all positions.
        weights: weights in fewer bits, ``int4`` or ``int8``, in short for passes that come before the others; arguments
            of `quantize` may follow: ``int4{method=rtn}``.
        max_length: positions that tables and caches can hold; the model's context if None, or else 4096.
        seed: of the random initialization, for sources without a checkpoint; 0 if None.
        dump_ir: folder for the text form after every pass.
        verify: check every pass on small random inputs in float64.
        adapters: folders of PEFT adapters to merge into the weights, one after the other.
        switch_adapters: folders of LoRA adapters to store beside the model as NAME.onnx_adapter: ONNX Runtime and
            onnxruntime-genai choose one of them, or none, when they run it.
        family: the family that a Hugging Face folder is read as, whatever type its config says.
        without: names of parts that may be left out although the model then computes something else.
        progress: called with (stage, bytes done, bytes in all).
        options: those of the target, as `weft targets NAME` lists them, among them
            ``prepack=True``: also store the weights in the CPU's packed layout (``ort-cpu``; twice the disk space);
            ``keep_blocks="head"`` or ``"all"``: the output head, or every linear map, is multiplied by the quantized
            blocks of the source where a kernel takes them exactly (``ort-cpu``, ``torch``);
            ``cache_dtype="int8"``: keep keys and values as integers (int8, int4; ``torch`` also fp8);
            ``activations="fp8"``: round what many tokens multiply with FP8 blocks to FP8, too (``torch``);

    Raises:
        WeftError: on any bad input; an older `out` survives.
    """
    clock = {"start": time.perf_counter()}
    backend = TARGETS.lookup(target)
    chosen = backend.choose(options)
    dtype = backend.dtype(dtype)
    model = load_source(source, seed, adapters, family, without)
    if switch_adapters:
        model = _with_slots(model, backend, switch_adapters)
    passes = pipeline_text(passes)
    first = "" if weights is None else weights_pipeline(model.graph, weights)
    passes = ", ".join(filter(None, (first, passes, *chosen.passes().values())))
    check_free(Path(out), model.files)  # before long work
    notes = model.notices()
    verify_graph(model.graph, recipes=True)
    length = _max_length(model.graph, max_length, notes)
    if (cached := getattr(chosen, CACHE_DTYPE, "")) and not any(map(caches, model.graph.nodes)):
        raise no_effect(f"--cache-dtype {cached}", f"no attention of {model.graph.name} keeps keys and values")
    clock["load"] = time.perf_counter()
    pipeline = backend.pipeline(model.graph, dtype, passes, length)
    report = Report()

    def step_of(name: str, done: int, total: int) -> None:
        if progress:
            progress(name, done, total)

    graph = run_passes(model.graph, pipeline, verify=verify, dump=dump_ir, report=report, progress=step_of)
    forms = make_forms(graph, backend.forms(graph, chosen), verify=verify, dump=dump_ir, report=report)
    warnings = [line for record in report.records for line in record.warnings]
    notes += warnings
    _check_table(graph, length, max_length is None, notes)
    if not any(line.startswith(f"{RopeLength.name}: ") for line in warnings):
        _note_context(graph, length, notes)
    built = backend.build(forms, dtype, length, chosen, notes)
    _check_effect(chosen, weights, report, getattr(built, "idle", {}))
    if backend.own_code:
        _note_family(model, notes)
    clock["passes"] = time.perf_counter()
    done, total = 0, built.weight_bytes

    def step(written: int) -> None:
        nonlocal done
        done += written
        if progress:
            progress("weights", done, total)

    with whole_folder(Path(out), model.files) as folder, hashing(model) as hashes:
        if model.tokenizer is not None:  # first: it may be refused
            model.tokenizer(folder)
        built.write(folder, step)
        manifest = record(graph, backend, dtype, length, str(pipeline), model, hashes())
        seal(folder, MANIFEST, manifest | built.facts)
    clock["write"] = time.perf_counter()
    seconds = {name: end - start for (_, start), (name, end) in itertools.pairwise(clock.items())}
    explained = partial(getattr(built, "explain", lambda report: []), report)
    return CompileReport(Path(out), target, dtype, model, graph, report, total, seconds, built.trace, notes, explained)


def _check_effect(chosen: Options, weights: str | None, report: Report, idle: Mapping[str, str]) -> None:
    """Check that `weights`, whose passes come first, and the `chosen` options, whose passes come last, change something
    of a model of which they do not change what is `idle`.

    Raises:
        WeftError: naming one that does not.
    """
    first = {record.applied.name: record.idle for record in reversed(report.records)}
    if weights is not None and (reason := first[lookup("quantize").name]):
        raise no_effect(f"--weights {weights}", reason)
    if why := first.get(chosen.passes().get(CACHE_DTYPE, "").partition("{")[0]):
        idle = {**idle, CACHE_DTYPE: why}
    for name, option in chosen.listed().items():
        if name in idle and (value := getattr(chosen, name)) != option.default:
            raise no_effect(f"{option.flag} {value}", idle[name])


def _note_family(model: Model, notes: list[str]) -> None:
    """Note that transformers has the architecture itself, where the source says which it is."""
    family = FAMILIES.get(str(model.graph.meta.get("model_type")))
    if family is not None and family.transformers and model.settings is not None:
        name = family.model_types[0]
        notes.append(f"transformers has this architecture: `weft export` writes it as {name}, to load without trust")


def _with_slots(model: Model, backend: Backend, adapters: Sequence[str | Path]) -> Model:
    """The model with a place for what each of `adapters` adds."""
    from ...formats.hf.slots import add_slots

    if not backend.opset:
        raise WeftError(f"--switch-adapter is for folders that ONNX Runtime runs, not for those for {backend.name}")
    if model.graph.meta.get("kind") == "encoder-decoder":
        raise WeftError(
            "--switch-adapter is for one model, not for the two of an encoder-decoder: merge them by --adapter"
        )
    graph = model.graph.clone()
    # Folders give the adapters their names, "." and ".." too.
    add_slots(graph, model.description, [Path(os.path.abspath(expanded(adapter))) for adapter in adapters])
    return replace(model, graph=graph)


def _max_length(graph: Graph, requested: int | None, notes: list[str]) -> int:
    context = graph.meta.get("context")
    if requested is None:
        if context is None and "input_ids" in graph.inputs:
            notes.append(f"the model states no context length: compiled for {MAX_LENGTH} tokens (see --max-length)")
    elif requested < 1:
        raise WeftError(f"--max-length {requested} must be positive")
    elif (kind := graph.meta.get("kind")) in ("image-encoder", "audio-encoder"):
        raise no_effect(f"--max-length {requested}", f"it counts tokens, and {graph.name} is an {kind}")
    if (length := int(requested or context or MAX_LENGTH)) > LONGEST:
        raise WeftError(f"a length of {length} tokens is more than {LONGEST:,}: choose a smaller --max-length")
    return length


def _note_context(graph: Graph, length: int, notes: list[str]) -> None:
    """Note that `length` is more than the model was made for, passes that extend its context included."""
    context = graph.meta.get("context")
    if context is not None and length > context:
        notes.append(
            f"the model states a context of {context:,} tokens: beyond it, up to the --max-length {length:,}, answers "
            "are likely to be worse (the pass extend-context may help)"
        )


def _check_table(graph: Graph, length: int, default: bool, notes: list[str]) -> None:
    """Texts of `length` fit the positions that `graph` has after its passes, which may have made them more."""
    table = graph.meta.get("max_positions")  # of learned positions, which end there
    if table is not None and length > table:
        raise WeftError(f"--max-length {length} exceeds the model's {table} learned positions")
    context = graph.meta.get("context") or length
    if default and context > length:
        notes.append(f"passes extend the context to {context} tokens, compiled for {length} (see --max-length)")
