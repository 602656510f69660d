"""Targets: a `Backend` describes a target, compiles for it, and opens its compiled folders.

Model code never depends on targets, and lowerings depend on a target's facts, not on its name. `backends/targets` has
weft's own targets.
"""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node
from weft.ir.registry import Registry
from weft.ir.types import dtypes
from weft.passes import Pass, Phase, Pipeline, default_pipeline, parse_pipeline
from weft.passes.edits.legalization import ACCEPTS, Accepts
from weft.passes.forms import Form
from weft.passes.library.cleanup.cast import CastDtype
from weft.passes.library.target.legalize import Legalize
from weft.passes.library.target.rope_length import RopeLength, has_length_dependent_rope

from .folder_facts import FolderFacts
from .options import MOVED, Option, Options

MODEL = "model"  # the form of the full model


class CompiledModel(Protocol):
    """A compiled model that is not written yet.

    - trace: lines about expanded ops, and about lowerings that refused a node, with their reasons; may be empty
    - facts: additional entries of the manifest
    - weight_bytes: the sum of the bytes that `write` reports to `step`
    - idle (optional): dict from each requested option that has no effect to the reason
    """

    trace: list[str]
    facts: dict[str, Any]
    weight_bytes: int

    def write(self, folder: Path, step: Callable[[int], None]) -> None:
        """Write everything into `folder`; call `step` with the number of bytes after each write."""


class Place(NamedTuple):
    """The target to compile for, the device ("cpu" or "cuda") that runs it, and the dtype (None: the default)."""

    target: str
    device: str
    dtype: str | None = None  # None: the target's first dtype

    def __str__(self) -> str:
        return f"{TARGETS[self.target].runtime} on {'the CPU' if self.device == 'cpu' else 'the GPU'}"


class Variant(NamedTuple):
    """The choices for one of the models of a folder: its target, the name of its dtype (None: the target's first), and
    the text of --weights (None: not quantized)."""

    target: Backend
    dtype: str | None
    weights: str | None


@dataclass(frozen=True)
class Backend(ABC):
    """A target of the compiler.

    - name, doc: its name, and a description in a few words
    - runtime, device: the runtime that runs its models, and the device: cpu, cuda or any
    - dtypes: names of the supported float dtypes, the default first
    - contrib: ONNX Runtime's own operators (com.microsoft) may be used
    - decodes: models decode quantized weights by DequantizeLinear, even if `contrib` has products by codes
    - opset, ir_version: versions of the ONNX models; 0: not ONNX
    - precision: dtype and weights of the models, as file names state them; "" if they do not
    - slower: names of passes of the default pipeline that are left out, because they make this target slower
    - phases: names of phases of the default pipeline (simplify, fuse, cache) that apply; (): all
    - chosen_on: devices for which `weft run` compiles for this target by default; targets registered first win
    """

    name: str
    doc: str
    runtime: str
    device: str
    dtypes: tuple[str, ...]
    contrib: bool = False
    decodes: bool = False
    opset: int = 0
    ir_version: int = 0
    precision: str = ""
    slower: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    chosen_on: tuple[str, ...] = ()

    options: ClassVar[type[Options]] = Options
    libraries: ClassVar[tuple[str, ...]] = ("numpy",)  # libraries whose versions the manifest records
    is_code: ClassVar[bool] = False  # a compiled folder is Python code, which runs when it is opened
    explains: ClassVar[bool] = False  # its built models have `explain`, which formats the report of passes as lines
    own_code: ClassVar[bool] = False  # its folders contain code that transformers runs
    runs: ClassVar[bool] = True  # weft can run its compiled folders
    trains: ClassVar[bool] = False  # models are for training: parameters stay as the architecture declares them

    # -- compiling

    @property
    def subject(self) -> str:
        """Return the name of the target in messages."""
        return f"target {self.name}"

    def dtype(self, name: str | None) -> str:
        """Return the canonical name of the dtype `name`; the target's first dtype if `name` is None. Raises WeftError
        if the dtype is unknown, or the target does not support it."""
        canonical = self.dtypes[0] if name is None else dtypes.parse(name, self.dtypes).name
        if canonical not in self.dtypes:
            raise WeftError(f"{self.subject} does not support {canonical}; it supports {', '.join(self.dtypes)}")
        return canonical

    def choose(self, given: Mapping[str, Any]) -> Options:
        """Return this target's options with the values in `given` (keyed by name) and defaults for the rest. An option
        that only other targets have is ignored if it has its default value. Raises WeftError if it has another value,
        and if an option is unknown or its value is wrong."""
        own_options, all_known = self.options.list_all(), collect_options()
        for name, value in given.items():
            if name in MOVED:
                raise WeftError(f"target {self.name} has no option {name!r} any more: {MOVED[name]}")
            if name not in all_known:
                takes = f"it takes {', '.join(own_options)}" if own_options else "it takes none"
                raise WeftError(f"target {self.name} has no option {name!r}; {takes}")
            option, targets = all_known[name]
            if name not in own_options and value != option.default:
                scope = f"{option.flag} is an option of {join_targets(targets)} only"
                raise WeftError(f"{scope}, not of {self.name}; leave it out")
        return self.options(
            **{name: own_options[name].check(value) for name, value in given.items() if name in own_options}
        )

    def specialize(self, options: Options) -> Backend:
        """Return the target with the facts that `options` change, such as the version of its operators."""
        return self

    def list_variants(self, options: Options, dtype: str | None, weights: str | None) -> list[Variant]:
        """Return the models that a folder gets, the main one first. Raises WeftError if `dtype` or `weights`, as given
        to the compiler, do not fit `options`."""
        return [Variant(self, dtype, weights)]

    def pipeline(
        self, graph: Graph, dtype: str, passes: str = "default", max_length: int | None = None, *, trains: bool = False
    ) -> Pipeline:
        """Return the pipeline that the text `passes` describes for `graph`, then a phase of the target's own passes if
        it has any. "default" excludes passes that this target leaves out. `max_length` is the length of the longest
        sequence (None: the model's context), `trains` as in `default_pipeline`. Raises WeftError on invalid text."""
        phases = default_pipeline(graph, max_length, trains=trains or self.trains).phases
        applying = (ph for ph in phases if not self.phases or ph.name in self.phases)
        kept_phases = tuple(Phase(ph.name, tuple(p for p in ph.passes if p.name not in self.slower)) for ph in applying)
        pipeline = parse_pipeline(passes, Pipeline(kept_phases))
        own_passes = self.finish(graph, pipeline, dtype, max_length, trains=trains or self.trains)
        return pipeline.add_phase("target", *own_passes) if own_passes else pipeline

    def finish(
        self, graph: Graph, pipeline: Pipeline, dtype: str, max_length: int | None, *, trains: bool
    ) -> tuple[Pass, ...]:
        """Return the target's own passes for `graph`, to run after `pipeline`: here a pass that sets `max_length` if it
        is given and RoPE frequencies depend on it, and a cast to `dtype` unless that is f32."""
        length = (RopeLength(max_length),) if max_length is not None and has_length_dependent_rope(graph) else ()
        return (*length, *(() if dtype == "f32" else (CastDtype(dtypes.parse(dtype)),)))

    @abstractmethod
    def lowerings(self, op: str) -> list[str]:
        """Return the names of the lowerings of the op named `op`, in the order in which they are tried."""

    @abstractmethod
    def refusals(self, node: Node) -> list[str] | None:
        """Return None if a lowering accepts `node`, else each lowering's reason for refusing it."""

    def takes(self, graph: Graph, form: str) -> Accepts:
        """Return a function that checks nodes as `refusals` does: nodes of the form `form` of `graph`, or of `graph`
        itself if `form` is "". Raises WeftError if the target has no separate lowerings for this form."""
        if form:
            raise WeftError(f"target {self.name} has only one form of a graph, not {form!r}: leave out form")
        return self.refusals

    def forms(self, graph: Graph, options: Options) -> dict[str, Form]:
        """Return the forms of `graph`, the result of the target's `pipeline`, that `build` needs: a dict from the name
        of a form to its `Form`, the pipeline that derives it. Raises WeftError if the target cannot run the graph."""
        return {MODEL: Form(Pipeline((Phase(MODEL, (Legalize(self.name),)),)))}

    @abstractmethod
    def build(
        self, forms: Mapping[str, Graph], dtype: str, length: int, options: Options, notes: list[str]
    ) -> CompiledModel:
        """Return the compiled model, not written yet, for sequences of at most `length` tokens. `forms` maps each name
        in the result of `self.forms`, and "" for the model itself, to a graph, which is not changed. Notes for the user
        are appended to `notes`. Raises WeftError if the target cannot run the graph, or a library is missing."""

    # -- running

    def place(self, device: str) -> Place:
        """Return the target, device and dtype with which a model runs on `device` (auto, cpu or cuda). Raises WeftError
        if the device or the target's runtime is missing, or weft does not run its folders."""
        raise WeftError(f"weft cannot run a folder compiled for {self.name}: load it with the tool it is for")

    def files(self, kind: str) -> tuple[str, ...]:
        """Return the names of the model files that a folder must contain, the main file first; `kind` is the kind of
        its model (decoder, encoder or encoder-decoder)."""
        return ()

    def open(self, facts: FolderFacts, device: str, threads: int | None) -> Any:
        """Open the compiled folder that `facts` describe on `device`, with `threads` CPU threads (None: the runtime's
        default). Return its `runtime.core.decoder.CachedDecoder`, or for an encoder its
        `runtime.ort.ort_encoder.EncoderModel`. Raises WeftError if the folder or the device cannot be used."""
        raise WeftError(f"weft cannot run {facts.folder}, compiled for {self.name}: load it with the tool it is for")

    def open_offloaded(self, facts: FolderFacts, device: str, threads: int | None, experts: int) -> Any:
        """Open a compiled folder like `open`, with only `experts` experts of each mixture on the device at a time;
        return its `CachedDecoder`. Raises WeftError as `open` does, and if the runtime cannot offload experts."""
        raise WeftError(
            f"{facts.folder} is compiled for {self.name}, which keeps all experts on the device: "
            "to keep only some there, compile it with --target torch"
        )

    def describe(self) -> dict[str, Any]:
        """Return JSON data: the fields of the target, and under "options" a dict from option name to its facts."""
        options = {
            o.name: {"type": o.type_text, "default": o.default, "help": o.help}
            for o in self.options.list_all().values()
        }
        return {**dataclasses.asdict(self), "options": options}


TARGETS: Registry[Backend] = Registry("target", "weft.backends.targets", "see `weft targets`")


def register(*backends: Backend) -> None:
    """Add targets to the registry `TARGETS`, and their methods `takes` to `ACCEPTS`, under the names of the targets."""
    for backend in backends:
        TARGETS.add(backend.name, backend)
        ACCEPTS.add(backend.name, backend.takes)


def import_torch() -> Any:
    """Import torch and return the module. Raises WeftError that names the package to install if it is missing."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise WeftError(f"PyTorch cannot be imported ({error}): install weft[torch]") from error


def collect_options() -> dict[str, tuple[Option, list[str]]]:
    """Return a dict from option name to (option, names of the targets that have it). If targets define an option
    differently, the definition with the most choices is returned."""
    merged: dict[str, tuple[Option, list[str]]] = {}
    for target in TARGETS.values():
        for name, option in target.options.list_all().items():
            widest_known, names = merged.get(name, (option, []))
            wider = option if len(option.choices) > len(widest_known.choices) else widest_known
            merged[name] = wider, [*names, target.name]
    return merged


def join_targets(names: list[str]) -> str:
    """Return target names as a phrase: "target torch", "the targets ort-cpu and torch"."""
    *most, last = names
    return f"the targets {', '.join(most)} and {last}" if most else f"target {last}"
