"""An architecture file that is being edited: its picture, integers and passes, after every change."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.network import build_network
from weft.backends.viz.web.page import list_model_data
from weft.ir.errors import WeftError
from weft.ir.storage.documents import read_bytes
from weft.passes import all_passes
from weft.passes.report import Report

from ...model import Model
from ..api.draw.drawing import Drawing, PictureOptions
from ..api.draw.fact_sheet import build_fact_sheet
from ..api.draw.tour import build_tour, write_totals
from ..api.inspect.counting import inspect
from ..api.inspect.inspection import Inspection
from ..api.rewrite import rewrite
from ..api.source.sources import load_edited
from .edits import list_numbers, replace_numbers

CHECKED = 20_000_000  # parameters up to which passes are checked on random weights: more would take long
STEP = "decode-torch"  # the pipeline of the kernels of a decode step
_LINE = re.compile(r":(\d+): ")


class Watched:
    """The file of `spec` ("model.py", "model.py:name"), with options of its picture.

    `version` counts the changes of `data`, the JSON data of the page for the last version that could be drawn,
    with an "error" ({"text", "line"}) if the newest cannot.
    """

    def __init__(self, spec: str, look: PictureOptions | None = None) -> None:
        path, separator, name = spec.partition(".py")
        if not separator:
            raise WeftError(f"--watch follows an architecture file, such as model.py, not {spec}")
        self.path, self.name = Path(f"{path}.py"), name.removeprefix(":") or None
        self._folder, self._look = f"{self.path.resolve().parent}{os.sep}", look or PictureOptions()
        self._model: Model | None = None  # the newest that could be drawn
        self._values: dict[int, int] = {}
        self._passes: tuple[str, ...] = ()
        self._stamps: dict[Path, int] = {}
        self._changed, self.version = threading.Condition(), 0
        self.drawing: Drawing | None = None
        self.data: dict[str, Any] = {"error": None, "numbers": [], "passes": []}
        self.update()

    # -- changes

    def poll(self) -> bool:
        """Draw the file again if it, or a module next to it that it imports, was saved; return whether it was."""
        if all(_stamp(path) == stamp for path, stamp in self._stamps.items()):
            return False
        self._values = {}
        for name in [name for name, module in sys.modules.items() if self._is_beside(module)]:
            del sys.modules[name]
        self.update()
        return True

    def edit(self, values: Mapping[int, int], passes: Iterable[str]) -> None:
        """Draw the file with other integers (index in `list_numbers` → value), and after `passes`."""
        self._values, self._passes = dict(values), tuple(passes)
        self.update()

    def wait(self, version: int, seconds: float) -> dict[str, Any]:
        """Return `data` once there is a version other than `version`, or after some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, seconds)
            return {**self.data, "version": self.version}

    def update(self) -> None:
        """Draw the file as it is now."""
        error = None
        try:
            page = self._draw()
        except WeftError as fault:
            line = _LINE.search(str(fault))
            error, page = {"text": str(fault), "line": int(line[1]) if line else None}, {}
        watched = {self.path, *(Path(str(m.__file__)) for m in [*sys.modules.values()] if self._is_beside(m))}
        self._stamps = {path: _stamp(path) for path in watched}
        with self._changed:
            self.data = {**self.data, **page, "error": error}
            self.version += 1
            self._changed.notify_all()

    def _draw(self) -> dict[str, Any]:
        code = read_bytes(self.path)
        model, report = self._load(code, self._values), Report()
        facts = inspect(model)
        if self._passes:
            model = rewrite(model, ", ".join(self._passes), verify=facts.parameters <= CHECKED, report=report)
            facts = inspect(model)
        network = build_network(model.graph)
        page_data = {"totals": write_totals(facts), "tour": build_tour(model, network, facts)}
        self.drawing = drawing = Drawing(build_scene(network), build_fact_sheet(model, facts), self._look, page_data)
        self._model = model
        numbers = [
            {**vars(n), "range": n.range, "now": self._values.get(i, n.value)} for i, n in enumerate(list_numbers(code))
        ]
        return {
            **list_model_data(drawing.root, drawing.open_keys),
            **drawing.more,
            "title": drawing.sheet.title,
            "numbers": numbers,
            "facts": _list_facts(facts),
            "passes": [
                _describe_pass(name, kind, report) for name, kind in sorted(all_passes().items()) if _is_plain(kind)
            ],
        }

    def _is_beside(self, module: object) -> bool:
        """Return whether a loaded module is a file next to the architecture file, or below."""
        file: str | None = getattr(module, "__file__", None)
        return file is not None and file.startswith(self._folder) and "site-packages" not in file

    def _load(self, code: bytes, values: Mapping[int, int]) -> Model:
        return load_edited(self.path, self.name, replace_numbers(code, values))

    # -- questions

    def list_launches(self) -> list[list[Any]] | str:
        """Return [op, count] of the kernels of a decode step in their order; a sentence if there is none."""
        if self._model is None or self._model.graph.meta.get("kind") != "decoder":
            return "Only decoders write token by token."
        try:
            step = rewrite(self._model, STEP).graph
        except WeftError as error:
            return str(error)
        return [[name, count] for name, count in Counter(node.op.name for node in step.nodes).items()]

    def compare(self, index: int) -> list[dict[str, Any]]:
        """Return the facts of the model for each value in the range of a number; {"value", "error"} where it fails."""
        code, results = read_bytes(self.path), list[dict[str, Any]]()
        for value in list_numbers(code)[index].range:
            try:
                facts = _list_facts(inspect(self._load(code, self._values | {index: value})))
            except WeftError as error:
                results.append({"value": value, "error": str(error)})
            else:
                results.append({"value": value, **facts})
        return results


def _list_facts(facts: Inspection) -> dict[str, Any]:
    return {
        "parameters": facts.parameters,
        "active": facts.active_parameters,
        "cache": 2 * (facts.cache_at_context or facts.cache_per_token or 0),
        "flops": facts.flops_per_token,
    }


@functools.cache
def _summarize(kind: Any) -> str:
    return str(kind.documentation().summary)


def _is_plain(kind: Any) -> bool:
    """Return whether the page lists the pass class `kind`: it has no required argument and is not for a target."""
    return not any(argument.required for argument in kind.arguments()) and kind.purpose != "Targets"


def _describe_pass(name: str, kind: Any, report: Report) -> dict[str, Any]:
    """Return JSON data about the pass `name`: effect, summary, purpose; if it ran, also rewrites and evidence."""
    described = {"name": name, "effect": kind.effect, "about": _summarize(kind), "purpose": kind.purpose}
    for record in report.records:
        if record.applied.name == name:
            described |= {"rewrites": record.rewrites, "evidence": record.evidence, "idle": record.idle}
            described |= {"difference": record.difference}
    return described


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
