"""Classes of models for transformers: constructors that read a config, forwards that pass caches and arguments."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.passes.library.target.sides import ENCODER, LOSS

from ...codegen.classes import ClassSource, ClassWriter, Constructor
from ...codegen.method_writer import MethodWriter
from ...codegen.structure import Loop, Method, ModuleCall
from ...codegen.value_names import NamedOperand, SourceLine
from ...program.statements import TOP, CacheSlot, ParamRef, Program, Statement, Var, relative_to
from ..lower.model_emitter import INDEX, HFEmitter
from .initial import DEFAULT_STD, write_init_lines
from .stack import CacheNumbers, Stack, list_attentions, number_caches

PAST = "past_key_values"


class HFMethodWriter(MethodWriter):
    """A writer of one forward, which passes the cache and keyword arguments to inner modules."""

    trains = False
    stream = "hidden_states"
    writer: HFClassWriter

    def result(self, outputs: str) -> str:
        if not self.top or not self.writer.returned:
            return super().result(outputs)
        past = self.token(self.writer.emitter.past)
        outputs_by_name = {name: self.token(o) for name, o in self.writer.outputs.items() if name != "logits"}
        if LOSS in outputs_by_name and self.writer.emitter.side == ENCODER:  # `generate` repeats it like rows
            outputs_by_name[LOSS] += f".repeat(len({self.token(self.writer.emitter.embeds)}))"
        texts = [f"{name}={text}" for name, text in outputs_by_name.items()]
        if self.writer.has_caches:  # positional: past_key_values is called cache from transformers 5.24 on
            texts[:1] = [next(iter(outputs_by_name.values())), past]
        return f"{self.writer.returned}({', '.join(texts)})"

    def _name_states(self) -> None:
        """Do nothing: states have no names, because all layers share one cache object."""

    def slot(self, item: Statement, slot: CacheSlot) -> str:
        if slot != INDEX:
            return PAST
        first = "layer_idx" if self.writer.emitter.shares_weights else "self.layer_idx"
        return self._write_cache_number(self.writer.get_offsets(self.method)[item], first)

    def _write_cache_number(self, offset: int, first: str = "layer_idx") -> str:
        """Return the source of the cache number `first` + `offset`; in the model's own forward just the offset."""
        if self.top:
            return str(offset)
        return f"{first} + {offset}" if offset else first

    def list_state_arguments(self, item: ModuleCall) -> list[str]:
        if not self.writer.takes_cache(item.callee):
            return []
        past = self.token(self.writer.emitter.past) if self.top else PAST
        keeps = item.slots or (self.writer.emitter.cached and self.writer.is_layer(item.path))
        arguments = [f"{PAST}={past}"] if keeps else []
        e = self.writer.emitter
        if self.top and e.attentions and e.is_decoder and e.positions not in item.inputs:
            arguments.append(f"position_ids={self.token(e.positions)}")
        if self.writer.takes_number(item.callee):
            arguments.append(f"layer_idx={self._write_cache_number(self.writer.get_offsets(self.method)[item])}")
        return [*arguments, "**kwargs"]

    def list_loop_arguments(self, loop: Loop, sources: list[tuple[str, str]]) -> list[str]:
        first, arguments = loop.calls[0], self.list_state_arguments(loop.calls[0])
        if any(self.writer.emitter.positions in call.inputs for call in loop.calls):  # some layers have it as an input
            arguments = [a for a in arguments if not a.startswith("position_ids=")]
        if not self.writer.takes_number(first.callee):
            return arguments
        starts = [self.writer.get_offsets(self.method)[c] for c in loop.calls]
        steps = {b - a for a, b in itertools.pairwise(starts)}
        if len(steps) == 1 and (step := steps.pop()) > 0:
            bounds = self._write_cache_number(starts[0]), self._write_cache_number(starts[-1] + step)
            sources.append(("layer_idx", f"range({', '.join(bounds)}{f', {step}' if step > 1 else ''})"))
        else:
            sources.append(("layer_idx", f"({', '.join(map(self._write_cache_number, starts))})"))
        return ["layer_idx=layer_idx" if a.startswith("layer_idx=") else a for a in arguments]

    def list_varying_arguments(self, loop: Loop, rests: list[str], sources: list[tuple[str, str]]) -> list[str]:
        kinds = [self.writer.names[c.callee.key] for c in loop.calls]
        table = dict(zip(kinds, rests, strict=True))
        stack = self.writer.stack
        is_stack = self.top and stack is not None and loop.calls is stack.calls
        if not is_stack or [table[kind] for kind in kinds] != rests:
            return super().list_varying_arguments(loop, rests, sources)
        entries = ", ".join(f'"{kind}": {rest}' for kind, rest in table.items())
        self.lines.append(SourceLine([], ast.parse(f"args = {{{entries}}}").body[0]))
        sources.append(("kind", f"self.config.{self.writer.kinds}"))
        return ["*args[kind]"]


@dataclass(frozen=True)
class WrittenClass:
    """A class of a base model. Another base model uses it if its own class of this name is equal in all fields.

    source: its lines. indexed: its constructor takes a cache number. takes_cache: its forward takes a cache and keyword
    arguments. initial_lines: the lines of ``_init_weights`` for it.
    """

    source: ClassSource
    indexed: bool
    takes_cache: bool
    initial_lines: list[str]


class HFClassWriter(ClassWriter):
    """A writer of the classes of a base model (or head) for transformers.

    top: name of the main class. config: name of the config class. returned: name of the class of the outputs, "" for a
    head. stack: the layers of the model, if it has a list.
    """

    body: type[MethodWriter]

    def __init__(
        self, program: Program, e: HFEmitter, top: str, config: str, returned: str, stack: Stack | None
    ) -> None:
        super().__init__(program)
        self.weights = program.weights
        self.emitter, self.top, self.config, self.returned, self.stack = e, top, config, returned, stack
        self.outputs = program.outputs
        self.has_caches = bool(e.cached)
        self.count_field = "num_hidden_layers"  # the config field with the number of layers
        self.table = "BLOCKS"  # name of the table of layer classes
        self.usual_std = DEFAULT_STD  # the most common standard deviation of initial weights
        self.other_classes: dict[str, WrittenClass] = {}  # classes of other base models
        self.own_classes: dict[str, WrittenClass] = {}
        self.reused: set[str] = set()  # names of other classes that this base model uses
        self.methods: dict[str, Method] = {}  # class name: its forward
        self._numbers: dict[Method, CacheNumbers] = {}
        self.body = type("Body", (HFMethodWriter,), {"writer": self})

    @property
    def kinds(self) -> str:
        """Return the name of the config property that lists the layers' classes: `table` in lower case."""
        return self.table.lower()

    # -- caches

    def get_numbers(self, method: Method) -> CacheNumbers:
        """Return the cache numbers of `method`, which are computed once."""
        if method not in self._numbers:
            self._numbers[method] = number_caches(method, self.emitter, self.stack if method.path == TOP else None)
        return self._numbers[method]

    def get_offsets(self, method: Method) -> dict[object, int]:
        """Map each statement with a cache and each call in `method` to the number of its first cache, from 0."""
        return self.get_numbers(method).first

    def takes_number(self, method: Method) -> bool:
        """Return whether the forward takes the number of its first cache: if it has caches and layers share weights."""
        return self.emitter.shares_weights and self.get_numbers(method).count > 0

    def takes_index(self, method: Method) -> bool:
        """Return whether the constructor takes the number of its first cache; it does not if layers share weights."""
        return not self.emitter.shares_weights and method.path != TOP and self.get_numbers(method).count > 0

    def is_indexed(self, method: Method) -> bool:
        """Return whether the constructor has the parameter layer_idx: it does for layers and for modules with caches,
        unless layers share weights."""
        return not self.emitter.shares_weights and (self.takes_index(method) or self.is_layer(method.path))

    def is_layer(self, path: str) -> bool:
        """Return whether the module at `path` is an entry of the list of layers."""
        return self.stack is not None and path.rpartition(".")[0] == self.stack.path

    def takes_cache(self, method: Method) -> bool:
        """Return whether `method` takes a cache and keyword arguments; all layers do if one layer does."""
        if self.is_layer(method.path) and self.stack is not None:
            return any(self._uses_cache(c.callee) for c in self.stack.calls)
        return self._uses_cache(method)

    def _uses_cache(self, method: Method) -> bool:
        """Return whether `method`, or a method that it calls, computes attention or has states."""
        attending = any(isinstance(i, Statement) and i in self.emitter.attentions for i in method.items)
        return attending or bool(method.slots) or any(map(self._uses_cache, method.modules.values()))

    # -- classes

    def write(self, method: Method) -> str:
        for item in method.items:  # name the result of an attention module after the module
            if isinstance(item, ModuleCall) and len(item.results) > 1 and list_attentions(item.callee, self.emitter):
                *_, output = (result for result in item.results if result.name != "weights")  # after shared keys
                output.name = item.path.rpartition(".")[2]
        name = super().write(method)
        if name in self.own_classes or name in self.reused:
            return name
        self.methods[name] = method
        initial = write_init_lines({name: method}, self.weights, self.usual_std)
        new = WrittenClass(self.classes[name], self.takes_index(method), self.takes_cache(method), initial)
        if self.other_classes.get(name) == new:
            self.reused.add(name)
        elif name in self.other_classes:
            name = self._rename(name, method)
        self.own_classes[name] = replace(new, source=self.classes[name])
        return name

    def _rename(self, name: str, method: Method) -> str:
        """Rename the class `name`, which another base model has too, by the side and a number; return the name."""
        new = fresh = f"{self.emitter.side.capitalize()}{name}"
        while fresh in self.other_classes or fresh in self.names.values():
            fresh = f"{new}{sum(n.startswith(new) for n in (*self.other_classes, *self.names.values())) + 1}"
        self.classes[fresh] = replace(self.classes.pop(name), name=fresh)
        self.methods[fresh] = self.methods.pop(name)
        self.names[method.key] = fresh
        return fresh

    def _is_hidden(self, v: Var) -> bool:
        return v.name == "hidden_states" or super()._is_hidden(v)

    def write_init(self, method: Method, inner: Mapping[str, str]) -> list[str]:
        lines = _HFConstructor(self, method).write(method, inner, set())
        attentions = list_attentions(method, self.emitter)
        inline = [facts for statement, facts in attentions if "self.scaling" in statement.text]
        if inline and method.path != TOP:
            facts, number = inline[0], "layer_idx" if self.takes_index(method) else "None"  # several share its weights
            return [
                f"self.config, self.layer_idx, self.is_causal = config, {number}, {facts.causal}",
                f"self.num_key_value_groups = {facts.groups}",
                f"self.scaling = {facts.scaling}",
                *lines,
            ]
        if self.takes_index(method) and any(isinstance(i, Statement) for i in self.get_offsets(method)):
            lines.insert(0, "self.config, self.layer_idx = config, layer_idx")
        return lines

    def list_top_parameters(self, method: Method) -> list[NamedOperand]:
        return [*self.inputs]

    def write_cache_parameter(self, method: Method) -> str:
        number = "layer_idx: int, " if self.takes_number(method) else ""
        return f"{number}{PAST}: Cache | None"

    def write_parameter(self, o: NamedOperand, name: str, top: bool) -> str:
        if isinstance(o, ParamRef):
            return f"{name}: Tensor"
        return f"{name}: {o.type}" + (f" = {o.default}" if o.default and top else "")


class _HFConstructor(Constructor):
    def __init__(self, writer: HFClassWriter, method: Method) -> None:
        super().__init__()
        self.writer, self.method = writer, method
        self.offsets: dict[str, int] = {}
        for item, offset in writer.get_offsets(method).items():
            if isinstance(item, ModuleCall):
                self.offsets.setdefault(relative_to(item.path, method.path), offset)

    def construct(self, place: str, name: str) -> str:
        method = self.writer.methods.get(name)
        if method is None:  # a module without a forward
            return f"{name}()"
        if not self.writer.is_indexed(method):
            return f"{name}(config)"
        start = "" if self.method.path == TOP else "layer_idx"
        offset = self.offsets.get(place, 0)
        index = " + ".join(filter(None, (start, str(offset) if offset or not start else "")))
        return f"{name}(config, {index})"

    def construct_list(self, place: str, names: Sequence[str]) -> str:
        stack = self.writer.stack
        is_stack = self.method.path == TOP and stack is not None and place == stack.path
        if not is_stack or stack is None or stack.caches is None:
            modules = [self.construct(f"{place}.{i}", name) for i, name in enumerate(names)]
            if len({*modules}) == 1:
                return f"nn.ModuleList({modules[0]} for _ in range({len(modules)}))"
            return f"nn.ModuleList([{', '.join(modules)}])"
        start = self.offsets.get(f"{place}.0", 0)
        index = "layer_idx" if stack.caches == 1 else f"{stack.caches} * layer_idx"
        index = f"{start} + {index}" if start else index
        count = f"range(config.{self.writer.count_field})"
        if len({*names}) == 1:
            return f"nn.ModuleList({names[0]}(config, {index}) for layer_idx in {count})"
        each = f"for layer_idx, kind in enumerate(config.{self.writer.kinds})"
        return f"nn.ModuleList({self.writer.table}[kind](config, {index}) {each})"


FIELD = re.compile(r"(?<![\w.\"])config\.(\w+)")


def read_config(lines: list[str], init: list[str], top: bool = False) -> None:
    """Replace ``config.x`` in the `lines` of a method by ``self.x``, and assign self.x in the constructor lines `init`.

    If `init` assigns another self.x, or the class is the main class (`top`), which has self.config, ``self.config.x``
    replaces it. `lines` and `init` change in place.
    """
    used = [*dict.fromkeys(m[1] for line in lines for m in FIELD.finditer(line))]
    assigned = {line.split(" ")[0].removeprefix("self.").split(".")[0] for line in init if line.startswith("self.")}
    attributes = [] if top else [name for name in used if name not in assigned]
    from_config = [name for name in used if name not in attributes]
    lines[:] = [
        FIELD.sub(lambda m: f"self.{m[1]}" if m[1] in attributes else f"self.config.{m[1]}", line) for line in lines
    ]
    if init == ["pass"] and used:
        init.clear()
    place = next((i + 1 for i, line in enumerate(init) if line.startswith("self.config")), 0)
    if from_config and not top and not place:
        init.insert(0, "self.config = config")
    init[place:place] = [f"self.{name} = config.{name}" for name in attributes]
