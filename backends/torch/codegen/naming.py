"""Names for the values of a method, and its lines as text: a name is used again when nobody reads what had it."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..program.snippets import RESERVED, library
from ..program.statements import Operand, ParamRef, Var

Named = Var | ParamRef


@dataclass(eq=False)
class Line:
    """``targets = tree``, a whole statement, or what is returned; names in `tree` are tokens until they are chosen."""

    targets: list[Named]
    tree: ast.AST
    comment: str = ""
    replaces: Operand | None = None
    movable: bool = False  # an expression that may be set into the one that reads it
    loop: tuple[tuple[Var, Operand], ...] = ()  # results of a loop, and what enters it in their place


class Names:
    """The names of the values in `lines`; `tokens` are what stands for them there until then. What passes through a
    loop is called `stream`."""

    def __init__(
        self, lines: Sequence[Line], tokens: dict[Operand, str], taken: Collection[str] = (), stream: str = "x"
    ) -> None:
        self.stream = stream
        self.lines, self.tokens, self.taken = lines, dict(tokens), {*RESERVED, *library(), *taken}
        for target in (t for line in lines for t in line.targets):
            self.token(target)
        self.wanted = self._wanted()
        self.last = self._last_reads()
        self.names: dict[str, str] = {}
        self.holder: dict[str, str] = {}  # name -> token that has it

    def token(self, o: Operand) -> str:
        return self.tokens.setdefault(o, f"_{len(self.tokens)}_")

    def _wanted(self) -> dict[Operand, str]:
        """Prefer the name of the stream for values that pass through a loop, and for those they are made from."""
        names: dict[Operand, str] = {}
        for line in reversed(self.lines):
            if len(line.loop) == 1:
                names |= dict.fromkeys(line.loop[0], self.stream)
            elif len(line.targets) == 1 and line.targets[0] in names and line.replaces is not None:
                names[line.replaces] = self.stream
        return names

    def _last_reads(self) -> dict[str, int]:
        """The number of the last line that reads a token; loops read what enters them."""
        known = {*self.tokens.values()}
        last: dict[str, int] = {}
        for i, line in enumerate(self.lines):
            read = {n.id for n in ast.walk(line.tree) if isinstance(n, ast.Name)} & known
            read |= {self.token(entering) for _, entering in line.loop}
            last.update(dict.fromkeys(read, i))
        return last

    def give(self, o: Named, name: str) -> str:
        """The name of a parameter, which would like to be called `name`."""
        token = self.token(o)
        if name == "cache":
            self.names[token] = name
        else:
            self.last[token] = max(self.last.get(token, 0), 0)
            self._take(token, name, -1)
        return self.names[token]

    def text(self) -> list[str]:
        """All lines; the last one returns."""
        out: list[str] = []
        for i, line in enumerate(self.lines):
            out += [f"{new} = {old}" for new, old in self._name_targets(i, line)]
            tree = _Rename(self.names).visit(line.tree)
            text = unparsed(tree)
            if line.targets and not line.loop:
                text = _assignment(", ".join(self.names[self.token(t)] for t in line.targets), tree)
            elif not line.targets and i == len(self.lines) - 1:
                text = f"return {', '.join(map(unparsed, tree.elts)) if isinstance(tree, ast.Tuple) else text}"
            *first, end = text.splitlines()
            out += [*first, f"{end}  # {line.comment}" if line.comment else end]
        return out

    def _name_targets(self, i: int, line: Line) -> list[tuple[str, str]]:
        """Name what line `i` makes; copies of what a loop would change though somebody reads it later."""
        copies = []
        entering: Mapping[Operand, Operand] = dict(line.loop)
        for target in line.targets:
            token = self.token(target)
            old = entering.get(target, line.replaces)
            name = self._freed(old, i)
            if name is not None:
                self.names[token], self.holder[name] = name, token
                continue
            wanted = self.wanted.get(target, target.name if isinstance(target, Var) else "weight")
            self._take(token, wanted, i - 1 if line.loop else i)  # a loop reads its names again and again
            if target in entering and old is not None:
                copies.append((self.names[token], self.names[self.token(old)]))
        return copies

    def _freed(self, old: Operand | None, i: int) -> str | None:
        """The name of `old`, if nobody reads it after line `i`."""
        token = None if old is None else self.tokens.get(old)
        if token is None or token not in self.names or self.last.get(token, -1) > i:
            return None
        name = self.names[token]
        return name if self.holder.get(name) == token else None

    def _take(self, token: str, wanted: str, at: int) -> None:
        name = base = f"{wanted}_" if keyword.iskeyword(wanted) else wanted
        if name == "x" and not self._free(name, at):
            name = base = "y"
        n = 1
        while not self._free(name, at):
            n += 1
            name = f"{base}_{n}"
        self.names[token], self.holder[name] = name, token

    def _free(self, name: str, at: int) -> bool:
        token = self.holder.get(name)
        unread = token is None or self.last.get(token, -1) <= at
        return unread and name not in self.taken


def _assignment(targets: str, tree: ast.AST) -> str:
    """``targets = tree``; an `if` where one branch of a conditional expression changes nothing."""
    if isinstance(tree, ast.IfExp):
        body, orelse = (unparsed(t).strip("()") for t in (tree.body, tree.orelse))
        if orelse == targets:
            return f"if {unparsed(tree.test)}:\n    {targets} = {unparsed(tree.body)}"
        if body == targets:
            return f"if {unparsed(_negated(tree.test))}:\n    {targets} = {unparsed(tree.orelse)}"
    return f"{targets} = {unparsed(tree)}"


def _negated(test: ast.expr) -> ast.expr:
    """The opposite of `test`."""
    opposites = {ast.Is: ast.IsNot, ast.Eq: ast.NotEq}
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in opposites:
        return ast.Compare(test.left, [opposites[type(test.ops[0])]()], test.comparators)
    return ast.UnaryOp(ast.Not(), test)


def unparsed(tree: ast.AST) -> str:
    """The text of `tree`, powers of negative numbers without parentheses."""
    return re.sub(r"\*\* \((-[\d.]+)\)", r"** \1", ast.unparse(tree))


class _Rename(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)
