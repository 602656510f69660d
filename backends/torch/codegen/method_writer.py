"""Write the lines of a method: expressions move into their readers while lines stay short, and values get names."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ..program.statements import CacheSlot, Operand, ParamRef, Statement, Submodule, Var, is_inside, relative_to
from .structure import Item, Loop, Method, ModuleCall, iter_operands
from .value_names import NamedOperand, SourceLine, ValueNames

WIDTH = 92  # the longest line that inlining may create
COMMENTED = 108  # the longest line together with its comment


class MethodWriter:
    """Writes the forward of `method`. given: its parameters, of which `hidden` (or none) gets the name `stream`. top:
    it is the whole model's forward. trains: loops support activation checkpointing, and the cache may be None."""

    trains = True
    stream = "x"

    def __init__(self, method: Method, given: list[NamedOperand], hidden: Var | None, top: bool) -> None:
        self.method, self.given, self.hidden, self.top = method, given, hidden, top
        self.tokens: dict[Operand, str] = {}
        self.lines: list[SourceLine] = []
        self.uses: Counter[Operand] = Counter()
        self.states: dict[Item, str] = {}

    # -- text with placeholders

    def token(self, o: Operand) -> str:
        """Return the source of a member; for any other operand a placeholder, replaced once names are chosen."""
        if isinstance(o, Submodule) or (isinstance(o, ParamRef) and is_inside(o.path, self.method.path)):
            return self.member(o.path)
        return self.tokens.setdefault(o, f"_{len(self.tokens)}_")

    def member(self, path: str) -> str:
        """Return the source that accesses the member at `path`, such as ``self.layers[0].norm``."""
        return write_attribute("self", relative_to(path, self.method.path))

    # -- lines

    def write(self, taken: Collection[str] = ()) -> tuple[list[str], list[str]]:
        """Return the names of the parameters, and the lines of the body; no variable gets a name in `taken`."""
        for item in self.method.items:
            # Twice for a loop: an expression with one use moves to its reader, and every round would compute it.
            self.uses.update([*iter_operands(item)] * (2 if isinstance(item, Loop) else 1))
        self.uses.update(self.method.outputs)
        self._name_states()
        for item in self.method.items:
            self._add(item)
        outputs = ", ".join(self.token(o) for o in self.method.outputs)
        self.lines.append(SourceLine([], self._inline(_parse_expression(self.result(outputs)), 7)[0]))
        names = ValueNames(self.lines, self.tokens, taken, self.stream)
        return [names.name_parameter(o, self._preferred_name(o)) for o in self.given], names.text()

    # -- to override

    def result(self, outputs: str) -> str:
        """Return the source of the returned value; `outputs` is the comma-separated source of the outputs."""
        return f"({outputs})"

    def slot(self, item: Statement, slot: CacheSlot) -> str:
        """Return the source of the cache `slot` that the statement `item` reads."""
        return self.states[item]

    def list_state_arguments(self, item: ModuleCall) -> list[str]:
        """Return the arguments that follow the inputs of the call `item`: its cache if the callee has states."""
        return [self.states[item]] if item.slots else []

    def list_loop_arguments(self, loop: Loop, sources: list[tuple[str, str]]) -> list[str]:
        """Return the arguments that follow the inputs in each call of `loop`: ["state"] if the callee has states, else
        []. With states, append ("state", source of an iterable of them) to `sources`, which the loop runs over."""
        if not loop.slots:
            return []
        same = all(c.path == loop.calls[0].path for c in loop.calls)
        count = len(loop.calls) if same else f"len({sources[0][1]})"
        sources.append(("state", self.states[loop] + f" or [None] * {count}" * self.trains))
        return ["state"]

    def list_varying_arguments(self, loop: Loop, rests: list[str], sources: list[tuple[str, str]]) -> list[str]:
        """Return ["*args"], which passes inputs that differ between the calls of `loop`; append ("args", iterable) to
        `sources`. `rests` has the source of a tuple of these inputs for each call."""
        sources.append(("args", write_periodic_list(rests)))
        return ["*args"]

    # -- writing

    def _preferred_name(self, o: NamedOperand) -> str:
        return self.stream if o is self.hidden else o.name if isinstance(o, Var) else o.path.replace(".", "_")

    def _name_states(self) -> None:
        stateful = self.method.stateful
        if len(stateful) == 1:
            first = "None if cache is None else cache[0]" if self.trains else "cache[0]"
            self.states[stateful[0]] = first if self.top and not isinstance(stateful[0], Loop) else "cache"
            return
        used: list[str] = []
        for item in stateful:
            if isinstance(item, Statement):
                stem = next(o.name for o in item.operands if isinstance(o, CacheSlot))
            else:
                stem = next((p for p in reversed(item.calls[0].path.split(".")) if not p.isdigit()), "layers")
            name = f"{stem}_cache" if stem != "cache" else "kv_cache"
            used.append(name if name not in used else f"{name}_{len(used) + 1}")
            self.states[item] = used[-1]
        if used:
            text = f"{', '.join(used)} = cache" + f" or ({', '.join(['None'] * len(used))})" * self.trains
            self.lines.append(SourceLine([], ast.parse(text).body[0]))

    def _add(self, item: Item) -> None:
        if isinstance(item, Loop):
            self._add_loop(item)
            return
        if isinstance(item, ModuleCall):
            arguments = [*(self.token(o) for o in item.inputs), *self.list_state_arguments(item)]
            text = f"{self.member(item.path)}({', '.join(arguments)})"
            guard = next((o for o in item.inputs if isinstance(o, Var) and o.skips), None) if self.top else None
            if guard is not None:
                nothing = "None" if len(item.results) == 1 else f"({', '.join(['None'] * len(item.results))})"
                text = f"{nothing} if {self.token(guard)} is None else {text}"
            replaces = next((o for o in item.inputs if _has_shape_of_all(o, item.results)), None)
            self._append(item.results, text, "", replaces)
            return
        if not item.text:  # it only makes its operands available in the scope
            return
        tokens = [self.slot(item, o) if isinstance(o, CacheSlot) else self.token(o) for o in item.operands]
        text = item.text.format(*tokens)
        if not item.results:
            self.lines.append(SourceLine([], self._inline(ast.parse(text).body[0], 60)[0]))
            return
        replaces = None if item.replaces is None else item.operands[item.replaces]
        self._append(item.results, text, item.comment, replaces)

    def _append(self, results: tuple[Var, ...], text: str, comment: str, replaces: Operand | None) -> None:
        names = 5 if replaces is not None else sum(len(v.name) + 2 for v in results) + 3
        tree, inlined = self._inline(_parse_expression(text), names, comment)
        for line in inlined:
            if replaces in line.targets:  # the inlined line's operand is replaced instead; it has the same layout
                replaces, comment = line.replaces, comment or line.comment
        changes = isinstance(tree, ast.IfExp) and replaces is not None  # it is written as an `if`
        movable = len(results) == 1 and self.uses[results[0]] == 1 and not changes
        self.lines.append(SourceLine([*results], tree, comment, replaces, movable))

    def _inline(self, tree: ast.AST, room: int, comment: str = "") -> tuple[ast.AST, list[SourceLine]]:
        """Move expressions of earlier lines into `tree`, nearest first, while it stays short (`WIDTH`, or `COMMENTED`
        with `comment`). Return the new tree and the lines that moved, which are removed from `lines`. `room` is the
        width before `tree`."""
        inlined: list[SourceLine] = []
        for line in reversed(self.lines):
            if not line.movable:
                continue
            (target,) = line.targets
            token = self.token(target)
            places = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == token]
            if len(places) != 1:
                continue
            # On a copy, parsed again: if the line grows too long, `tree` must stay as it is.
            grown = _Inliner(token, line.tree).visit(ast.parse(ast.unparse(tree)))
            long = len(self._render(grown)) + room
            if (long > WIDTH or (comment and long + len(comment) > COMMENTED)) and not isinstance(tree, ast.Name):
                continue
            body = grown.body[0]
            tree = body.value if isinstance(body, ast.Expr) else body
            self.lines.remove(line)
            inlined.append(line)
        return tree, inlined

    def _render(self, tree: ast.AST) -> str:
        text = ast.unparse(tree)
        for o, token in self.tokens.items():
            text = text.replace(token, o.name if isinstance(o, Var) else "weight")
        return text

    def _add_loop(self, loop: Loop) -> None:
        calls, first = loop.calls, loop.calls[0]
        results = loop.results
        chained = dict(zip(loop.chained, results, strict=True))
        inputs = [[self.token(chained.get(i, o)) for i, o in enumerate(call.inputs)] for call in calls]
        arguments, rests = _split_common(inputs)
        sources: list[tuple[str, str]] = []  # loop variable, iterable
        body, callee = list[str](), self.member(first.path)
        if any(c.path != first.path for c in calls):
            callee = "layer"
            _, cut = find_layer_slice(self.method, calls)
            sources.append(("layer", self.member(first.path.rpartition(".")[0]) + cut))
            if self.trains:  # with activation checkpointing (Chen 2016, arXiv 1604.06174), unless there is a cache
                asked = "self.checkpointing and state is None" if loop.slots else "self.checkpointing"
                body.append(f"run = partial(checkpoint, layer, use_reentrant=False) if {asked} else layer")
                callee = "run"
        if rests:
            arguments += self.list_varying_arguments(loop, rests, sources)
        arguments += self.list_loop_arguments(loop, sources)
        variables, iterables = zip(*(sources or [("_", f"range({len(calls)})")]), strict=True)
        over = iterables[0] if len(iterables) == 1 else f"zip({', '.join(iterables)})"
        body.append(f"{', '.join(map(self.token, results))} = {callee}({', '.join(arguments)})")
        text = "\n    ".join([f"for {', '.join(variables)} in {over}:", *body])
        pairs = tuple((result, first.inputs[i]) for i, result in chained.items())
        self.lines.append(SourceLine([*results], ast.parse(text).body[0], loop=pairs))


def _parse_expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


class _Inliner(ast.NodeTransformer):
    def __init__(self, name: str, expression: ast.AST) -> None:
        self.name, self.expression = name, expression

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.expression if node.id == self.name else node


def _split_common(lists: list[list[str]]) -> tuple[list[str], list[str]]:
    """Return the leading arguments that all calls share, and for each call the source of a tuple of its other
    arguments. `lists` has the arguments of each call. The second list is empty if all arguments are shared."""
    shared = [c[0] for c in itertools.takewhile(lambda column: len({*column}) == 1, zip(*lists, strict=False))]
    rests = [f"({', '.join(a[len(shared) :])}{',' if len(a) == len(shared) + 1 else ''})" for a in lists]
    return shared, [] if set(rests) == {"()"} else rests


def write_periodic_list(texts: list[str]) -> str:
    """Return the source of a list of the expressions `texts`, with repetitions as products, such as ``[A, B] * 6``."""
    n = len(texts)
    for size in range(1, n // 2 + 1):
        if texts[size:] == texts[:-size]:
            times, rest = divmod(n, size)
            text = f"[{', '.join(texts[:size])}] * {times}"
            return f"{text} + [{', '.join(texts[:rest])}]" if rest else text
    runs = [(text, len(list(run))) for text, run in itertools.groupby(texts)]
    if 2 * len(runs) <= n:
        return " + ".join(f"[{text}]" + f" * {times}" * (times > 1) for text, times in runs)
    return f"[{', '.join(texts)}]"


def _has_shape_of_all(o: Operand, results: Iterable[Var]) -> bool:
    """Return whether `o` is a variable of known shape and all `results` have that shape: its name can be reused."""
    return isinstance(o, Var) and o.shape is not None and all(v.shape == o.shape for v in results)


def find_layer_slice(method: Method, calls: Sequence[ModuleCall]) -> tuple[str, str]:
    """Return the path, relative to `method`, of the ModuleList whose modules `calls` run in order, and the source of
    the slice that selects these, such as ``[2:5]``; "" if they are the complete list."""
    container = relative_to(calls[0].path, method.path).rpartition(".")[0]
    numbers = [int(c.path.rpartition(".")[2]) for c in calls]
    paths = (relative_to(p, method.path) for p in (*method.modules, *method.members))
    parts = (relative_to(p, container).partition(".")[0] for p in paths if is_inside(p, container))
    count = 1 + max(int(part) for part in parts if part.isdigit())
    complete = (numbers[0], numbers[-1]) == (0, count - 1)
    return container, "" if complete else f"[{numbers[0]}:{numbers[-1] + 1}]"


def write_attribute(base: str, path: str) -> str:
    """Return the source that accesses the dotted `path` from the expression `base`; numbers become indices."""
    for part in path.split(".") if path else []:
        base += f"[{part}]" if part.isdigit() else f".{part}"
    return base
