"""Choose names for the values of a method, and write its lines: a name is reused once its value has no more readers."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..program.snippets import RESERVED, read_library
from ..program.statements import Operand, ParamRef, Var

NamedOperand = Var | ParamRef


@dataclass(eq=False)
class SourceLine:
    """One line ``targets = tree``. Without targets, `tree` is a statement, or in the last line the returned expression.
    `tree` has placeholders for operands. replaces: the operand whose name the target may reuse."""

    targets: list[NamedOperand]
    tree: ast.AST
    comment: str = ""
    replaces: Operand | None = None
    movable: bool = False  # an expression that may be inlined into its reader
    loop: tuple[tuple[Var, Operand], ...] = ()  # results of a loop, with the operands that enter it


class ValueNames:
    """Chooses the names of the values in `lines`. tokens: placeholder of each operand. taken: names that no value gets.
    stream: the preferred name of a value that a loop passes to its next iteration, if it passes only one."""

    def __init__(
        self, lines: Sequence[SourceLine], tokens: dict[Operand, str], taken: Collection[str] = (), stream: str = "x"
    ) -> None:
        self.stream = stream
        self.lines, self.tokens, self.taken = lines, dict(tokens), {*RESERVED, *read_library(), *taken}
        for target in (t for line in lines for t in line.targets):
            self.token(target)
        self.wanted = self._prefer_stream()
        self.last = self._last_reads()
        self.names: dict[str, str] = {}
        self.holder: dict[str, str] = {}  # name -> token of its current value

    def token(self, o: Operand) -> str:
        return self.tokens.setdefault(o, f"_{len(self.tokens)}_")

    def _prefer_stream(self) -> dict[Operand, str]:
        """Map to the name `stream`: the only result of a loop, the operand that enters the first iteration in its
        place, and each operand whose name one of these may reuse."""
        names: dict[Operand, str] = {}
        for line in reversed(self.lines):
            if len(line.loop) == 1:
                names |= dict.fromkeys(line.loop[0], self.stream)
            elif len(line.targets) == 1 and line.targets[0] in names and line.replaces is not None:
                names[line.replaces] = self.stream
        return names

    def _last_reads(self) -> dict[str, int]:
        """Map each token to the index of the last line that reads it; a loop also reads the operands that enter it."""
        tokens = {*self.tokens.values()}
        last: dict[str, int] = {}
        for i, line in enumerate(self.lines):
            read = {n.id for n in ast.walk(line.tree) if isinstance(n, ast.Name)} & tokens
            read |= {self.token(entering) for _, entering in line.loop}
            last.update(dict.fromkeys(read, i))
        return last

    def name_parameter(self, o: NamedOperand, name: str) -> str:
        """Choose and return the name of the parameter `o`: `name`, followed by a number if it is taken. A parameter
        called cache keeps its name."""
        token = self.token(o)
        if name == "cache":
            self.names[token] = name
        else:
            self.last[token] = max(self.last.get(token, 0), 0)
            self._assign_name(token, name, -1)
        return self.names[token]

    def text(self) -> list[str]:
        """Return the source of all lines with their final names; a last line without targets becomes a return."""
        out: list[str] = []
        for i, line in enumerate(self.lines):
            out += [f"{new} = {old}" for new, old in self._name_targets(i, line)]
            tree = _Rename(self.names).visit(line.tree)
            text = unparse(tree)
            if line.targets and not line.loop:
                text = _write_assignment(", ".join(self.names[self.token(t)] for t in line.targets), tree)
            elif not line.targets and i == len(self.lines) - 1:
                text = f"return {', '.join(map(unparse, tree.elts)) if isinstance(tree, ast.Tuple) else text}"
            *first, end = text.splitlines()
            out += [*first, f"{end}  # {line.comment}" if line.comment else end]
        return out

    def _name_targets(self, i: int, line: SourceLine) -> list[tuple[str, str]]:
        """Choose names for the results of line `i`; return pairs (new, old): ``new = old`` must precede the line."""
        copies = []
        entering: Mapping[Operand, Operand] = dict(line.loop)
        for target in line.targets:
            token = self.token(target)
            old = entering.get(target, line.replaces)
            name = self._reusable_name(old, i)
            if name is not None:
                self.names[token], self.holder[name] = name, token
                continue
            wanted = self.wanted.get(target, target.name if isinstance(target, Var) else "weight")
            self._assign_name(token, wanted, i - 1 if line.loop else i)  # a loop reads its names in every iteration
            if target in entering and old is not None:
                copies.append((self.names[token], self.names[self.token(old)]))
        return copies

    def _reusable_name(self, old: Operand | None, i: int) -> str | None:
        """Return the name of `old` if `old` still has it and no line after line `i` reads `old`, else None."""
        token = None if old is None else self.tokens.get(old)
        if token is None or token not in self.names or self.last.get(token, -1) > i:
            return None
        name = self.names[token]
        return name if self.holder.get(name) == token else None

    def _assign_name(self, token: str, wanted: str, at: int) -> None:
        name = base = f"{wanted}_" if keyword.iskeyword(wanted) else wanted
        if name == "x" and not self._is_free(name, at):
            name = base = "y"
        n = 1
        while not self._is_free(name, at):
            n += 1
            name = f"{base}_{n}"
        self.names[token], self.holder[name] = name, token

    def _is_free(self, name: str, at: int) -> bool:
        token = self.holder.get(name)
        unread = token is None or self.last.get(token, -1) <= at
        return unread and name not in self.taken


def _write_assignment(targets: str, tree: ast.AST) -> str:
    """Return the source of ``targets = tree``. A conditional with `targets` as one branch becomes an `if` statement."""
    if isinstance(tree, ast.IfExp):
        body, orelse = (unparse(t).strip("()") for t in (tree.body, tree.orelse))
        if orelse == targets:
            return f"if {unparse(tree.test)}:\n    {targets} = {unparse(tree.body)}"
        if body == targets:
            return f"if {unparse(_negate(tree.test))}:\n    {targets} = {unparse(tree.orelse)}"
    return f"{targets} = {unparse(tree)}"


def _negate(test: ast.expr) -> ast.expr:
    opposites = {ast.Is: ast.IsNot, ast.Eq: ast.NotEq}
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in opposites:
        return ast.Compare(test.left, [opposites[type(test.ops[0])]()], test.comparators)
    return ast.UnaryOp(ast.Not(), test)


def unparse(tree: ast.AST) -> str:
    """Return the source of `tree`; negative exponents have no parentheses (``x ** -0.5``)."""
    return re.sub(r"\*\* \((-[\d.]+)\)", r"** \1", ast.unparse(tree))


class _Rename(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)
