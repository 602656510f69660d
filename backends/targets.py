"""Targets: a `Backend` for each. It holds the facts of a target, and compiles for it and opens what it compiled.

Model code never asks about targets, and lowerings ask for facts, not for names. `backends/catalogue` has weft's own.
"""

from __future__ import annotations

import dataclasses
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
from weft.passes.edits.legalization import TAKES, Accepts
from weft.passes.forms import Form
from weft.passes.library.cleanup.cast import Cast
from weft.passes.library.target.legalize import Legalize
from weft.passes.library.target.rope_length import RopeLength, depends

from .facts import Facts
from .options import MOVED, Option, Options

MODEL = "model"  # the form that holds the whole model


class Built(Protocol):
    """A model for a target that is not written yet.

    `trace` tells which ops were expanded and which lowerings refused and why, and may be empty. `facts` is what its
    manifest says besides. `weight_bytes` are the bytes that `write` reports to `step`, for the progress bar. A
    dictionary `idle`, if it has one, names options that were asked for and change nothing of it, with the reason.
    """

    trace: list[str]
    facts: dict[str, Any]
    weight_bytes: int

    def write(self, folder: Path, step: Callable[[int], None]) -> None:
        """Write everything into `folder`; `step` is told the bytes just written."""


class Place(NamedTuple):
    """Target to compile a source for, and the device ("cpu" or "cuda") that it then runs on."""

    target: str
    device: str
    dtype: str | None = None  # the first of the target's

    def __str__(self) -> str:
        return f"{TARGETS[self.target].runtime} on {'the CPU' if self.device == 'cpu' else 'the GPU'}"


@dataclass(frozen=True)
class Backend(ABC):
    """A target, `name`: its `runtime` runs models on `device` (cpu, cuda or any) in the float `dtypes`, best first.

    Of ONNX models `opset` and `ir_version` are the version (0: it is none), and `contrib` tells whether ONNX Runtime's
    own operators (com.microsoft) may be used beside it. `slower` names passes of the default pipeline that make
    this target slower and are left out. `phases` names the phases of that pipeline (simplify, fuse, cache) that apply;
    if it is empty, all do. `chosen_on` lists the devices for which `weft run` compiles a
    source for this target by default; the targets registered first are preferred.
    """

    name: str
    doc: str
    runtime: str
    device: str
    dtypes: tuple[str, ...]
    contrib: bool = False
    opset: int = 0
    ir_version: int = 0
    slower: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    chosen_on: tuple[str, ...] = ()

    options: ClassVar[type[Options]] = Options
    libraries: ClassVar[tuple[str, ...]] = ("numpy",)  # whose versions the manifest states
    is_code: ClassVar[bool] = False  # a folder is Python, which runs when it is opened
    explains: ClassVar[bool] = False  # what it builds has `explain`, which makes lines of the report of its passes
    own_code: ClassVar[bool] = False  # its folders bring code along that transformers runs
    runs: ClassVar[bool] = True  # weft runs what is compiled for it
    trains: ClassVar[bool] = False  # what it compiles is trained: parameters stay as the architecture declares them

    # -- compiling

    def dtype(self, name: str | None) -> str:
        """Return the name of the dtype `name`, the first of the target's if None.

        Raises:
            WeftError: if it is none, or none that the target computes in.
        """
        found = self.dtypes[0] if name is None else dtypes.parse(name, self.dtypes).name
        if found not in self.dtypes:
            raise WeftError(f"target {self.name} does not support {found}; it supports {', '.join(self.dtypes)}")
        return found

    def choose(self, given: Mapping[str, Any]) -> Options:
        """Return the options of this target that are `given` by name; those of others must have their defaults.

        Raises:
            WeftError: if one is unknown, is for other targets, or has a wrong value.
        """
        own, known = self.options.listed(), all_options()
        for name, value in given.items():
            if name in MOVED:
                raise WeftError(f"target {self.name} has no option {name!r} any more: {MOVED[name]}")
            if name not in known:
                takes = f"it takes {', '.join(own)}" if own else "it takes none"
                raise WeftError(f"target {self.name} has no option {name!r}; {takes}")
            option, targets = known[name]
            if name not in own and value != option.default:
                raise WeftError(f"{option.flag} supports {in_words(targets)} only, not {self.name}; leave it out")
        return self.options(**{name: own[name].check(value) for name, value in given.items() if name in own})

    def pipeline(
        self,
        graph: Graph,
        dtype: str,
        passes: str = "default",
        max_length: int | None = None,
        *,
        trains: bool = False,
    ) -> Pipeline:
        """Return the pipeline that `passes` spells for `graph` in `dtype` and texts of at most `max_length` tokens
        (None: the model's context), with the target's own phase at its end. `trains` as in `default_pipeline`.

        Raises:
            WeftError: if the text is wrong.
        """
        phases = default_pipeline(graph, max_length, trains=trains or self.trains).phases
        applying = (ph for ph in phases if not self.phases or ph.name in self.phases)
        paying = tuple(Phase(ph.name, tuple(p for p in ph.passes if p.name not in self.slower)) for ph in applying)
        pipeline = parse_pipeline(passes, Pipeline(paying))
        own = self.finish(graph, pipeline, dtype, max_length, trains=trains or self.trains)
        return pipeline.then("target", *own) if own else pipeline

    def finish(
        self, graph: Graph, pipeline: Pipeline, dtype: str, max_length: int | None, *, trains: bool
    ) -> tuple[Pass, ...]:
        """Return the target's own passes of `graph`, after `pipeline`: the length of texts, and the cast to `dtype`."""
        length = (RopeLength(max_length),) if max_length is not None and depends(graph) else ()
        return (*length, *(() if dtype == "f32" else (Cast(dtypes.parse(dtype)),)))

    @abstractmethod
    def lowerings(self, op: str) -> list[str]:
        """Return the names of the lowerings of the op called `op`, in the order in which they are tried."""

    @abstractmethod
    def refusals(self, node: Node) -> list[str] | None:
        """Return why no lowering takes `node`, one line each; None if one does."""

    def takes(self, graph: Graph, form: str) -> Accepts:
        """Return the function that lists, as `refusals` does, why no lowering takes a node in that `form` of `graph`.

        Raises:
            WeftError: if the target has no such form with lowerings of its own.
        """
        if form:
            raise WeftError(f"target {self.name} has no lowerings for a form {form!r}: leave it out")
        return self.refusals

    def forms(self, graph: Graph, options: Options) -> dict[str, Form]:
        """Return by name the forms of `graph`, as its pipeline leaves it, that `build` takes, and how they are made.

        Raises:
            WeftError: if the target cannot run the graph.
        """
        return {MODEL: Form(Pipeline((Phase(MODEL, (Legalize(self.name),)),)))}

    @abstractmethod
    def build(self, forms: Mapping[str, Graph], dtype: str, length: int, options: Options, notes: list[str]) -> Built:
        """Return a model, not written yet, of graphs by form ("" is the graph itself), for at most `length` tokens.

        It changes none of them. Users read what it `notes`.

        Raises:
            WeftError: if the target cannot run the graph, or a library is missing.
        """

    # -- running

    def place(self, device: str) -> Place:
        """Return where a source runs on `device` (auto, cpu or cuda) when it is compiled for this target.

        Raises:
            WeftError: if what runs it is missing.
        """
        raise WeftError(f"weft does not run what is compiled for {self.name}")

    def files(self, kind: str) -> tuple[str, ...]:
        """Return the files of a model of this `kind` (decoder …) without which a folder is not whole, the main one
        first."""
        return ()

    def open(self, facts: Facts, device: str, threads: int | None) -> Any:
        """Return the `runtime.core.decoder.Decoder` of a folder, or of an encoder its `runtime.ort.encoder.Encoder`.

        Raises:
            WeftError: if the folder or the device cannot be used.
        """
        raise WeftError(f"{facts.folder} is compiled for {self.name}, which weft does not run")

    def open_offloaded(self, facts: Facts, device: str, threads: int | None, experts: int) -> Any:
        """Return the `Decoder` of a folder of which so many `experts` of each mixture are on the device.

        Raises:
            WeftError: as `open` does, or if what runs the folder holds all experts.
        """
        raise WeftError(
            f"{facts.folder} is compiled for {self.name}, which holds all experts on the device: to hold some of them, "
            "compile it with --target torch"
        )

    def describe(self) -> dict[str, Any]:
        """Return the facts and options as plain data."""
        options = {
            o.name: {"type": o.type_text, "default": o.default, "help": o.help} for o in self.options.listed().values()
        }
        return {**dataclasses.asdict(self), "options": options}


TARGETS: Registry[Backend] = Registry("target", "weft.backends.catalogue", "see `weft targets`")


def register(*backends: Backend) -> None:
    """Make targets known by their names."""
    for backend in backends:
        TARGETS.add(backend.name, backend)
        TAKES.add(backend.name, backend.takes)


def all_options() -> dict[str, tuple[Option, list[str]]]:
    """Return the options of all targets by name, each with the names of the targets that have it; of one that several
    have, that with the most choices."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for target in TARGETS.values():
        for name, option in target.options.listed().items():
            known, names = found.get(name, (option, []))
            widest = option if len(option.choices) > len(known.choices) else known
            found[name] = widest, [*names, target.name]
    return found


def in_words(names: list[str]) -> str:
    """Return targets as a sentence names them: "target torch", "the targets ort-cpu and torch"."""
    *most, last = names
    return f"the targets {', '.join(most)} and {last}" if most else f"target {last}"
