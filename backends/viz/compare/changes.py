"""Differences between two corresponding operations: all of them for a panel, a summary for the box."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..model.labels import choose_title, describe_sizes
from ..model.marks import Change
from ..model.network import Vertex, Weight

UNSET = "not set"
QUOTED = re.compile(r"(['\"])(?:\\.|(?!\1).)*\1")

Recipe = Callable[[Weight], str]


def find_changes(before: Vertex, after: Vertex, names: Mapping[str, str], recipe: Recipe) -> list[Change]:
    """Return all differences of the operations `before` and `after` (operator, attributes, operands, types, weights).

    `names` maps value names of the first network to the second's. Weights are compared by type and by the text that
    `recipe` returns. If the operators differ, attributes that only one operation has are omitted.
    """
    return [
        *_compare_texts("operation", before.op, after.op),
        *(c for name in {**before.attrs, **after.attrs} for c in _compare_attribute(name, before, after)),
        *_compare_operands(before, after, names),
        *_compare_texts("makes", ", ".join(before.types), ", ".join(after.types)),
        *_compare_weights(before.weights, after.weights, recipe),
    ]


def strip_tensor_names(text: str) -> str:
    """Return the recipe `text` with every quoted string, such as the name of a checkpoint tensor, replaced by ''."""
    return QUOTED.sub("''", text)


def summarize_changes(before: Vertex, after: Vertex, differences: Sequence[Change]) -> tuple[str, ...]:
    """Return at most two lines that summarize `differences` in an operation's box ("was RMSNorm", "other weights")."""
    lines = []
    kinds = {c.what.partition(" ")[0] for c in differences}
    old, new = describe_sizes(before.weft_op), describe_sizes(after.weft_op)
    if before.op != after.op:
        lines.append(f"was {choose_title(before.weft_op)}")
    elif old != new and old:
        lines.append(f"was {old}")
    else:
        lines += [f"{c.what} was {c.before}" for c in differences if c.what in {**before.attrs, **after.attrs}][:2]
    if not lines and "reads" in kinds:
        lines.append(_summarize_operands(before.roles, after.roles))
    elif not lines and "makes" in kinds:
        lines.append(f"was {_describe_type(before.types, after.types)}")
    recipes = [c.what.removesuffix(": recipe") for c in differences if c.what.endswith(": recipe")]
    if recipes and before.op == after.op and old == new:
        others = [name.removeprefix("weight ").replace("_", " ") for name in recipes if name != "weight"]
        lines.append(f"other {_join_first(others)}" if len(others) == len(recipes) else "other weights")
    return tuple(lines[:2])


def _compare_texts(what: str, before: str, after: str) -> Iterator[Change]:
    if before != after:
        yield Change(what, before, after)


def _compare_attribute(name: str, before: Vertex, after: Vertex) -> Iterator[Change]:
    old, new = (str(v.attrs.get(name, UNSET)) for v in (before, after))
    if before.op == after.op or UNSET not in (old, new):
        yield from _compare_texts(name, old, new)


def _compare_operands(before: Vertex, after: Vertex, names: Mapping[str, str]) -> Iterator[Change]:
    ours = _group_by_role(before, [names.get(name, name) for name in before.reads])
    theirs = _group_by_role(after, after.reads)
    earlier = _group_by_role(before, before.reads)
    for role in {**ours, **theirs}:
        if ours.get(role) != theirs.get(role):
            old, new = (", ".join(operands.get(role, ())) or UNSET for operands in (earlier, theirs))
            yield Change(f"reads {role}", old, new, named=True)


def _group_by_role(v: Vertex, names: Sequence[str]) -> dict[str, list[str]]:
    roles: dict[str, list[str]] = {}
    for i, name in enumerate(names):
        roles.setdefault(v.roles[i] if i < len(v.roles) else "", []).append(name)
    return roles


def _compare_weights(before: Sequence[Weight], after: Sequence[Weight], recipe: Recipe) -> Iterator[Change]:
    for i in range(max(len(before), len(after))):
        a, b = (w[i] if i < len(w) else None for w in (before, after))
        name = (b or a or before[0]).name.rpartition(".")[2]
        what = name if name == "weight" else f"weight {name}"
        old, new = (f"{w.dtype}{w.shape}" if w else "none" for w in (a, b))
        yield from _compare_texts(f"{what}: type", old, new)
        if a is None or b is None or recipe(a) != recipe(b):
            old, new = (w.recipe if w else "none" for w in (a, b))
            yield Change(f"{what}: recipe", old, new, named=True)


def _summarize_operands(before: Sequence[str], after: Sequence[str]) -> str:
    added, removed = ([role for role in a if role not in b] for a, b in ((after, before), (before, after)))
    if added:
        return f"reads {_join_first(added)} too"
    return f"reads no {_join_first(removed)} now" if removed else "reads other values"


def _join_first(names: Sequence[str]) -> str:
    return ", ".join([*names[:2], *(["…"] if len(names) > 2 else [])])


def _describe_type(before: Sequence[str], after: Sequence[str]) -> str:
    """Return the first type of `before` that differs (only the dtype if the shapes are equal). If only the number of
    types differs, return all of `before`."""
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a != b]
    if not pairs:
        return ", ".join(before)
    (old, shape), (_, new_shape) = (text.partition("[")[::2] for text in pairs[0])
    return old if shape == new_shape else pairs[0][0]
