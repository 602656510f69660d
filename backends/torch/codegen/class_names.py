"""Choose the names of classes in a generated source, by the ops of each class or its path in the model."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from weft.ir import ops
from weft.ir.graph import Node

from ..program.statements import Statement
from .structure import Method, ModuleCall

CLASSES = {"attn": "Attention", "cross": "CrossAttention", "ffn": "FeedForward", "layers": "Block"}
KINDS = {  # ops that replace attention, and feed-forwards
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


def name_classes(top: Method, whole: str, nodes: Iterable[Node], taken: set[str]) -> dict[Hashable, str]:
    """Map the key of each method to a class name that is not in `taken`; the class of `top` is called `whole`. `nodes`
    are all nodes of the graph. A class with an inner class of its name gets the suffix Group. A class that would still
    have the name of another gets a prefix (see `_distinguish`), or else a number."""
    places, groups = defaultdict[Hashable, list[str]](list), defaultdict[str, list[Hashable]](list)
    titles: dict[Hashable, str] = {}
    within: dict[str, list[Node]] = {}
    for method in top.walk():
        places[method.key].append(method.path)
        if method.key not in titles:
            inner = within[method.path] = [n for n in nodes if f"{n.scope}.".startswith(f"{method.path}.")]
            title = whole if method is top else _choose_title(method.path, inner)
            group = any(titles[m.key] == title for m in method.modules.values())
            titles[method.key] = f"{title}Group" if group else title
    for key, title in titles.items():
        groups[title].append(key)
    names: dict[Hashable, str] = {}
    for title, keys in groups.items():
        for key, name in zip(keys, _distinguish(title, [places[k] for k in keys], within), strict=True):
            used = taken.union({whole}, names.values())
            numbered = itertools.chain([name], (f"{name}{n}" for n in itertools.count(2)))
            names[key] = whole if key == top.key else next(new for new in numbered if new not in used)
    return names


def list_own_nodes(method: Method) -> list[Node]:
    """Return the nodes that `method`'s own statements compute; inner methods and hoisted statements do not count."""
    statements = (i for i in method.items if isinstance(i, Statement) and not i.early)
    return list(dict.fromkeys(i.node for i in statements if i.node is not None))


def list_calls(method: Method) -> list[ModuleCall]:
    """Return the calls of inner methods in order; each iteration of a loop is one call."""
    return [call for item in method.items if not isinstance(item, Statement) for call in item.calls]


def _list_kinds(nodes: Iterable[Node]) -> list[str]:
    """Return the class names of attentions, recurrences and feed-forwards among `nodes`, in order, without duplicates.
    Next to a mixture of experts, a feed-forward is its shared expert and is left out."""
    kinds = [kind for node in nodes if (kind := _choose_kind(node))]
    if "MoE" in kinds:
        kinds = [k for k in kinds if k != "FeedForward"]  # the shared expert
    return list(dict.fromkeys(kinds))


def _choose_kind(node: Node) -> str:
    if node.op is ops.attention:
        special = "Latent" if node.attrs.get("value_dim") else "Window" if node.attrs["window"] else ""
        return f"{special}Attention"
    return KINDS.get(node.op.name, "")


def _choose_title(path: str, nodes: list[Node]) -> str:
    """Return the preferred class name of the module at `path`, which computes `nodes`; it need not be unique."""
    last, kinds = next((p for p in reversed(path.split(".")) if not p.isdigit()), path), _list_kinds(nodes)
    if last == "attn" and kinds:
        return kinds[0]
    if last == "ffn" and "MoE" in kinds:
        return "MoE"
    return CLASSES.get(last, "".join(w.capitalize() for w in last.split("_"))) or "Snippet"


def _distinguish(title: str, places: Sequence[list[str]], within: Mapping[str, list[Node]]) -> list[str]:
    """Return a name for each of several classes called `title`; names may remain equal. `places` has the paths of each
    class. If the first parts of the paths differ, these are the prefixes, such as Encoder. Names that are still equal
    get a prefix from `_choose_words`; `within` maps a path to the nodes inside it."""
    if len(places) == 1:
        return [title]
    sides = [{p.partition(".")[0] for p in paths if "." in p} for paths in places]
    names = [title] * len(places)
    if len(set().union(*sides)) > 1 and all(len(s) <= 1 for s in sides):
        names = [f"{''.join(s).capitalize()}{title}" for s in sides]
    for name in sorted({n for n in names if names.count(n) > 1}):
        alike = [i for i, n in enumerate(names) if n == name]
        for i, word in zip(alike, _choose_words([within[places[i][0]] for i in alike]), strict=True):
            names[i] = name if word == title else f"{word}{name}"
    return names


def _choose_words(classes: Sequence[list[Node]]) -> list[str]:
    """Return a prefix for each class, given its nodes: a word for a kind of op that only it has, or for its first kind,
    or "". If all classes have the same kinds, it is "NoPE" for a class without RoPE where others have it, else ""."""
    kinds = [_list_kinds(nodes) for nodes in classes]
    union = set().union(*kinds)
    if len({tuple(k) for k in kinds}) == 1:
        rotated = [any(n.op is ops.rope for n in nodes) for nodes in classes]
        return ["NoPE" if any(rotated) and not r else "" for r in rotated]
    prefixes = {k: k.removesuffix("Attention") or k for k in union}
    prefixes |= {"Attention": "Global"} if "WindowAttention" in union else {}
    prefixes |= {"FeedForward": "Dense"} if "MoE" in union else {}
    words = []
    for mine in kinds:
        unique = [k for k in mine if sum(k in theirs for theirs in kinds) == 1]
        words.append(next((prefixes[k] for k in (*unique, *mine)), ""))
    return words
