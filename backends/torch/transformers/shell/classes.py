"""Classes of models for transformers: constructors that read a config, methods that hand on caches and arguments."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.passes.library.target.sides import ENCODER, LOSS

from ...codegen.classes import Class, ClassWriter
from ...codegen.members import Constructor
from ...codegen.method_writer import Writer
from ...codegen.naming import Line, Named
from ...codegen.structure import Call, Loop, Method
from ...program.statements import TOP, CacheSlot, ParamRef, Program, Statement, Var, relative
from ..lower.emitter import INDEX, ShellEmitter
from .initial import RANGE, initial_lines
from .stack import CacheNumbers, Stack, attends, cache_numbers

PAST = "past_key_values"


class ShellBody(Writer):
    """Writes the forward of one method, which hands on the cache and further arguments."""

    trains = False
    stream = "hidden_states"
    writer: ShellWriter

    def result(self, outputs: str) -> str:
        if not self.top or not self.writer.returned:
            return super().result(outputs)
        past = self.token(self.writer.emitter.past)
        made = {name: self.token(o) for name, o in self.writer.outputs.items() if name != "logits"}
        if LOSS in made and self.writer.emitter.side == ENCODER:  # generating repeats it as it does rows
            made[LOSS] += f".repeat(len({self.token(self.writer.emitter.embeds)}))"
        texts = [f"{name}={text}" for name, text in made.items()]
        if self.writer.keeps_any:  # by place: the second is called past_key_values, and from transformers 5.24 on cache
            texts[:1] = [next(iter(made.values())), past]
        return f"{self.writer.returned}({', '.join(texts)})"

    def _name_states(self) -> None:
        """All layers keep what they keep in one cache."""

    def slot(self, item: Statement, slot: CacheSlot) -> str:
        return self._index(item) if slot == INDEX else PAST

    def _index(self, item: Statement) -> str:
        offset = self.writer.offsets(self.method)[item]
        return self._numbered(offset, "layer_idx" if self.writer.emitter.shared else "self.layer_idx")

    def _numbered(self, offset: int, first: str = "layer_idx") -> str:
        """The number of a cache, that of the method's first one being `first`."""
        if self.top:
            return str(offset)
        return f"{first} + {offset}" if offset else first

    def state_arguments(self, item: Call) -> list[str]:
        if not self.writer.takes(item.callee):
            return []
        past = self.token(self.writer.emitter.past) if self.top else PAST
        keeps = item.slots or (self.writer.emitter.cached and self.writer.listed(item.path))
        more = [f"{PAST}={past}"] if keeps else []
        if (
            self.top
            and self.writer.emitter.attending
            and self.writer.emitter.decodes
            and self.writer.emitter.positions not in item.inputs
        ):
            more.append(f"position_ids={self.token(self.writer.emitter.positions)}")
        if self.writer.told(item.callee):
            more.append(f"layer_idx={self._numbered(self.writer.offsets(self.method)[item])}")
        return [*more, "**kwargs"]

    def loop_arguments(self, loop: Loop, sources: list[tuple[str, str]]) -> list[str]:
        first, handed = loop.calls[0], self.state_arguments(loop.calls[0])
        if any(self.writer.emitter.positions in call.inputs for call in loop.calls):  # some layers are given it already
            handed = [h for h in handed if not h.startswith("position_ids=")]
        if not self.writer.told(first.callee):
            return handed
        starts = [self.writer.offsets(self.method)[c] for c in loop.calls]
        steps = {b - a for a, b in itertools.pairwise(starts)}
        if len(steps) == 1 and (step := steps.pop()) > 0:
            bounds = self._numbered(starts[0]), self._numbered(starts[-1] + step)
            sources.append(("layer_idx", f"range({', '.join(bounds)}{f', {step}' if step > 1 else ''})"))
        else:
            sources.append(("layer_idx", f"({', '.join(map(self._numbered, starts))})"))
        return ["layer_idx=layer_idx" if h.startswith("layer_idx=") else h for h in handed]

    def varying_arguments(self, loop: Loop, rests: list[str], sources: list[tuple[str, str]]) -> list[str]:
        kinds = [self.writer.names[c.callee.key] for c in loop.calls]
        table = dict(zip(kinds, rests, strict=True))
        if (
            not self.top
            or not self.writer.is_stack(loop)
            or any(table[k] != r for k, r in zip(kinds, rests, strict=True))
        ):
            return super().varying_arguments(loop, rests, sources)
        entries = ", ".join(f'"{kind}": {rest}' for kind, rest in table.items())
        self.lines.append(Line([], ast.parse(f"args = {{{entries}}}").body[0]))
        sources.append(("kind", f"self.config.{self.writer.kinds}"))
        return ["*args[kind]"]


@dataclass(frozen=True)
class Written:
    """A class as `written`: whether it is told the number of its cache, and takes more arguments; how its weights are
    `drawn`."""

    written: Class
    indexed: bool
    takes: bool
    drawn: list[str]


class ShellWriter(ClassWriter):
    """Writes the classes of a base model for transformers, called `top`; `outputs` are those of the model."""

    body: type[Writer]

    def __init__(
        self, program: Program, e: ShellEmitter, top: str, config: str, returned: str, stack: Stack | None
    ) -> None:
        super().__init__(program)
        self.weights = program.weights
        self.emitter, self.top, self.config, self.returned, self.stack = e, top, config, returned, stack
        self.outputs = program.outputs
        self.keeps_any = bool(e.cached)
        self.count_field = "num_hidden_layers"  # which number of a config counts the layers of the stack
        self.table = "BLOCKS"  # of the classes of layers
        self.usual = RANGE  # the deviation that most weights are drawn with
        self.known: dict[str, Written] = {}  # classes of other base models
        self.written: dict[str, Written] = {}
        self.reused: set[str] = set()  # known ones that serve here, too
        self.methods: dict[str, Method] = {}  # by the name of their class
        self._numbers: dict[Method, CacheNumbers] = {}
        body = type("Body", (ShellBody,), {"writer": self})
        self.body = body

    @property
    def kinds(self) -> str:
        """The property of a config that tells the class of each layer."""
        return self.table.lower()

    # -- caches

    def numbers(self, method: Method) -> CacheNumbers:
        """The numbers of the caches of a method."""
        if method not in self._numbers:
            self._numbers[method] = cache_numbers(method, self.emitter, self.stack if method.path == TOP else None)
        return self._numbers[method]

    def offsets(self, method: Method) -> dict[object, int]:
        """The number of the cache of each statement and call of a method, counted within it."""
        return self.numbers(method).first

    def told(self, method: Method) -> bool:
        """Return whether a method is told the number of its first cache in every call: layers share its weights."""
        return self.emitter.shared and self.numbers(method).count > 0

    def indexed(self, method: Method) -> bool:
        """Return whether a class is told the number of its first cache."""
        return not self.emitter.shared and method.path != TOP and self.numbers(method).count > 0

    def listed(self, path: str) -> bool:
        """Return whether the module at `path` is a layer."""
        return self.stack is not None and path.rpartition(".")[0] == self.stack.path

    def is_stack(self, loop: Loop) -> bool:
        return self.stack is not None and loop.calls is self.stack.calls

    def takes(self, method: Method) -> bool:
        """Return whether a method takes a cache and further arguments: as another layer of the stack does."""
        if self.listed(method.path) and self.stack is not None:
            return any(self._asks(c.callee) for c in self.stack.calls)
        return self._asks(method)

    def _asks(self, method: Method) -> bool:
        """Return whether anything in a method attends, or keeps something."""
        own = any(isinstance(i, Statement) and i in self.emitter.attending for i in method.items)
        return own or bool(method.slots) or any(map(self._asks, method.modules.values()))

    # -- classes

    def write(self, method: Method) -> str:
        for item in method.items:  # what a part makes is called as the part is
            if isinstance(item, Call) and len(item.results) > 1 and attends(item.callee, self.emitter):
                *_, made = (result for result in item.results if result.name != "weights")  # behind keys for others
                made.name = item.path.rpartition(".")[2]
        name = super().write(method)
        if name in self.written or name in self.reused:
            return name
        self.methods[name] = method
        told = Written(self.classes[name], self.indexed(method), self.takes(method), self._drawn(name, method))
        if self.known.get(name) == told:
            self.reused.add(name)
        elif name in self.known:
            name = self._renamed(name, method)
        self.written[name] = replace(told, written=self.classes[name])
        return name

    def _drawn(self, name: str, method: Method) -> list[str]:
        """List the lines that draw the initial values of the weights of a class."""
        return initial_lines({name: method}, self.weights, self.usual)

    def _renamed(self, name: str, method: Method) -> str:
        """Another name for a class whose `name` another base model has for something else."""
        new = fresh = f"{self.emitter.side.capitalize()}{name}"
        while fresh in self.known or fresh in self.names.values():
            fresh = f"{new}{sum(n.startswith(new) for n in (*self.known, *self.names.values())) + 1}"
        self.classes[fresh] = replace(self.classes.pop(name), name=fresh)
        self.methods[fresh] = self.methods.pop(name)
        self.names[method.key] = fresh
        return fresh

    def _is_hidden(self, v: Var) -> bool:
        return v.name == "hidden_states" or super()._is_hidden(v)

    def init(self, method: Method, inner: Mapping[str, str]) -> list[str]:
        lines = _ShellConstructor(self, method).write(method, inner, set())
        own = attends(method, self.emitter)
        inline = [told for statement, told in own if "self.scaling" in statement.text]
        if inline and method.path != TOP:
            told = inline[0]  # of several, which share its weights
            causal, number = told.causal, "layer_idx" if self.indexed(method) else "None"
            first = [
                f"self.config, self.layer_idx, self.is_causal = config, {number}, {causal}",
                f"self.num_key_value_groups = {told.groups}",
                f"self.scaling = {told.scaling}",
            ]
            return [*first, *lines]
        if self.indexed(method) and any(isinstance(i, Statement) for i in self.offsets(method)):
            lines.insert(0, "self.config, self.layer_idx = config, layer_idx")
        return lines

    def top_parameters(self, method: Method) -> list[Named]:
        return [*self.inputs]

    def state(self, method: Method) -> str:
        number = "layer_idx: int, " if self.told(method) else ""
        return f"{number}{PAST}: Cache | None"

    def parameter(self, o: Named, name: str, top: bool) -> str:
        if isinstance(o, ParamRef):
            return f"{name}: Tensor"
        return f"{name}: {o.type}" + (f" = {o.default}" if o.default and top else "")


class _ShellConstructor(Constructor):
    def __init__(self, writer: ShellWriter, method: Method) -> None:
        super().__init__()
        self.writer, self.method = writer, method
        self.offsets: dict[str, int] = {}
        for item, offset in writer.offsets(method).items():
            if isinstance(item, Call):
                self.offsets.setdefault(relative(item.path, method.path), offset)

    def construct(self, place: str, name: str) -> str:
        method = self.writer.methods.get(name)
        if method is None:  # what only holds parts
            return f"{name}()"
        if self.writer.emitter.shared or (not self.writer.indexed(method) and not self.writer.listed(method.path)):
            return f"{name}(config)"
        start = "" if self.method.path == TOP else "layer_idx"
        offset = self.offsets.get(place, 0)
        index = " + ".join(filter(None, (start, str(offset) if offset or not start else "")))
        return f"{name}(config, {index})"

    def construct_list(self, place: str, names: Sequence[str]) -> str:
        stack = self.writer.stack
        if self.method.path != TOP or stack is None or place != stack.path or stack.caches is None:
            made = [self.construct(f"{place}.{i}", name) for i, name in enumerate(names)]
            if len({*made}) == 1:
                return f"nn.ModuleList({made[0]} for _ in range({len(made)}))"
            return f"nn.ModuleList([{', '.join(made)}])"
        start = self.offsets.get(f"{place}.0", 0)
        index = "layer_idx" if stack.caches == 1 else f"{stack.caches} * layer_idx"
        index = f"{start} + {index}" if start else index
        count = f"range(config.{self.writer.count_field})"
        if self.writer.emitter.shared:
            made = [f"{name}(config)" for name in names]
            if len({*made}) == 1:
                return f"nn.ModuleList({made[0]} for _ in range({len(made)}))"
            return f"nn.ModuleList([{', '.join(made)}])"
        if len({*names}) == 1:
            return f"nn.ModuleList({names[0]}(config, {index}) for layer_idx in {count})"
        each = f"for layer_idx, kind in enumerate(config.{self.writer.kinds})"
        return f"nn.ModuleList({self.writer.table}[kind](config, {index}) {each})"


FIELD = re.compile(r"(?<![\w.\"])config\.(\w+)")


def read_config(lines: list[str], init: list[str], taken: Collection[str] | None) -> None:
    """Let the `lines` of a method, changed in place, read the numbers of a config that `init` keeps under their names;
    or from the config that the module has, if no names are `taken`."""
    used = [*dict.fromkeys(m[1] for line in lines for m in FIELD.finditer(line))]
    own = [] if taken is None else [name for name in used if name not in taken]
    whole = [name for name in used if name not in own]
    lines[:] = [FIELD.sub(lambda m: f"self.{m[1]}" if m[1] in own else f"self.config.{m[1]}", line) for line in lines]
    if init == ["pass"] and used:
        init.clear()
    place = next((i + 1 for i, line in enumerate(init) if line.startswith("self.config")), 0)
    if whole and taken is not None and not place:
        init.insert(0, "self.config = config")
    init[place:place] = [f"self.{name} = config.{name}" for name in own]
