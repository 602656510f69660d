"""Names of the classes in a generated source: by what they compute, or by their place in the architecture."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

from weft.ir import ops
from weft.ir.graph import Node

from ..program.statements import Statement
from .structure import Call, Loop, Method

CLASSES = {"attn": "Attention", "cross": "CrossAttention", "ffn": "FeedForward", "layers": "Block"}
KINDS = {  # what stands in the place of an attention, or is a feed-forward
    "selective_scan": "Mamba",
    "ssd": "Mamba2",
    "linear_attention": "LinearAttention",
    "gated_linear_attention": "GatedLinearAttention",
    "gated_delta_rule": "GatedDeltaNet",
    "relative_attention": "RelativeAttention",
    "block_sparse_attention": "BlockSparseAttention",
    "scan": "Recurrence",
    "moe": "MoE",
    **dict.fromkeys(("glu", "relu", "relu2", "gelu", "elu"), "FeedForward"),
}


def class_names(top: Method, whole: str, nodes: Iterable[Node], taken: set[str]) -> dict[Hashable, str]:
    """The names of all classes by the key of their methods, none of them `taken`; that of `top` is `whole`.

    Classes that would be called the same are told apart by the side of the model that they stand on, then by what the
    `nodes` of the graph in them compute; what is left is numbered.
    """
    places: dict[Hashable, list[str]] = {}
    titles: dict[Hashable, str] = {}
    within: dict[str, list[Node]] = {}
    for method in top.walk():
        places.setdefault(method.key, []).append(method.path)
        if method.key not in titles:
            own = within[method.path] = [n for n in nodes if f"{n.scope}.".startswith(f"{method.path}.")]
            title = whole if method is top else _title(method.path, own)
            group = any(titles[m.key] == title for m in method.modules.values())
            titles[method.key] = f"{title}Group" if group else title
    groups: dict[str, list[Hashable]] = {}
    for key, title in titles.items():
        groups.setdefault(title, []).append(key)
    names: dict[Hashable, str] = {}
    for title, keys in groups.items():
        for key, name in zip(keys, _apart(title, [places[k] for k in keys], within), strict=True):
            names[key] = whole if key == top.key else _fresh(name, taken.union({whole}, names.values()))
    return names


def own_nodes(method: Method) -> list[Node]:
    """The nodes that the steps of a method itself stand for."""
    own = (i for i in method.items if isinstance(i, Statement) and not i.early)
    return list(dict.fromkeys(i.node for i in own if i.node is not None))


def calls(method: Method) -> list[Call]:
    """The calls of inner methods, in order, loops unrolled."""
    return [c for i in method.items for c in ([i] if isinstance(i, Call) else i.calls if isinstance(i, Loop) else [])]


def _kinds(nodes: Iterable[Node]) -> list[str]:
    """The attentions, recurrences and feed-forwards among `nodes`, in order."""
    found = [kind for node in nodes if (kind := _kind(node))]
    if "MoE" in found:
        found = [k for k in found if k != "FeedForward"]  # the expert that all tokens share
    return list(dict.fromkeys(found))


def _kind(node: Node) -> str:
    if node.op is ops.attention:
        special = "Latent" if node.attrs.get("value_dim") else "Window" if node.attrs["window"] else ""
        return f"{special}Attention"
    return KINDS.get(node.op.name, "")


def _title(path: str, nodes: list[Node]) -> str:
    """Name the class of the module at `path`, conflicts aside."""
    last, found = next((p for p in reversed(path.split(".")) if not p.isdigit()), path), _kinds(nodes)
    if last == "attn" and found:
        return found[0]
    if last == "ffn" and "MoE" in found:
        return "MoE"
    return CLASSES.get(last, "".join(w.capitalize() for w in last.split("_"))) or "Snippet"


def _apart(title: str, places: Sequence[list[str]], within: Mapping[str, list[Node]]) -> list[str]:
    """Names for classes that would all be called `title`, each of modules at some paths, as different as one word can
    tell."""
    if len(places) == 1:
        return [title]
    sides = [{p.partition(".")[0] for p in paths if "." in p} for paths in places]
    names = [title] * len(places)
    if len(set().union(*sides)) > 1 and all(len(s) <= 1 for s in sides):
        names = [f"{''.join(s).capitalize()}{title}" for s in sides]
    for name in sorted({n for n in names if names.count(n) > 1}):
        alike = [i for i, n in enumerate(names) if n == name]
        for i, word in zip(alike, _words([within[places[i][0]] for i in alike]), strict=True):
            names[i] = name if word == title else f"{word}{name}"
    return names


def _words(classes: Sequence[list[Node]]) -> list[str]:
    """A word for each class that tells what it computes from what the others do; nothing where there is none."""
    own = [_kinds(nodes) for nodes in classes]
    known = set().union(*own)
    if len({tuple(k) for k in own}) == 1:
        turned = [any(n.op is ops.rope for n in nodes) for nodes in classes]
        return ["NoPE" if any(turned) and not t else "" for t in turned]
    called = {k: k.removesuffix("Attention") or k for k in known}
    called |= {"Attention": "Global"} if "WindowAttention" in known else {}
    called |= {"FeedForward": "Dense"} if "MoE" in known else {}
    words = []
    for mine in own:
        alone = [k for k in mine if sum(k in other for other in own) == 1]
        words.append(next((called[k] for k in (*alone, *mine)), ""))
    return words


def _fresh(name: str, taken: set[str]) -> str:
    numbered = (f"{name}{n}" for n in itertools.count(2))
    return next(new for new in itertools.chain([name], numbered) if new not in taken)
