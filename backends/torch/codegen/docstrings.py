"""Class names and docstrings of generated sources, derived from the graph."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from weft.ir import ops
from weft.ir.graph import Graph, Node

from ..program.block_params import count_parameters
from ..program.statements import TOP, Program, Statement
from .structure import Method, ModuleCall, iter_operands

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


GATES = {"silu": "SwiGLU", "gelu": "GEGLU", "gelu_tanh": "GEGLU", "relu": "ReGLU", "identity": "bilinear unit"}
ACTIVATION_NAMES = {  # the activation of a feed-forward without gate
    **{ops.relu: "ReLU", ops.relu2: "squared ReLU", ops.gelu: "GELU", ops.elu: "ELU", ops.swish: "SiLU"},
    **{ops.tanh: "tanh", ops.sigmoid: "sigmoid"},
}
DESCRIPTIONS = {
    ops.selective_scan: "Mamba (Gu & Dao 2023): a selective state space",
    ops.ssd: "Mamba-2 (Dao & Gu 2024): a selective state space with a scalar decay per head",
    ops.gated_linear_attention: "gated linear attention (Yang 2023)",
    ops.gated_delta_rule: "the gated delta rule (Yang 2024)",
    ops.linear_attention: "linear attention (Katharopoulos 2020)",
    ops.scan: "a recurrence: what `step` makes of one token after the other",
    ops.relative_attention: "attention with relative keys and values (Shaw 2018)",
    ops.lightning_index: "the keys that every query chooses (DeepSeek-V3.2, 2025)",
    ops.block_sparse_attention: "attention to some blocks of keys (Zaheer 2020)",
}
NORMS = (ops.rms_norm, ops.layer_norm)
STYLES = (  # by the `_classify_norm` of all norms of a block
    ({"pre"}, "a pre-norm block"),
    ({"post"}, "a post-norm block"),
    ({"pre", "after"}, "a block with norms around its parts"),
    ({"after"}, "a block with a norm after each part"),
)


def write_model_doc(graph: Graph, program: Program, kernels: bool) -> list[str]:
    """Return the lines of a generated file's docstring: kind, size, imports, inputs, outputs and cache of the model.
    `kernels`: the source imports the package `kernels`."""
    weights = sum(map(count_parameters, program.weights.values()))
    kind = str(graph.meta.get("kind", "model"))
    required = (v for v in program.inputs if v.shape is not None and not v.default)
    inputs = ", ".join(f"{v.name} [{', '.join(map(str, v.shape or ()))}]" for v in required)
    usage = f"`Model` takes {inputs} and returns {', '.join(program.outputs)}."
    lines = [f"{graph.name}: {'an' if kind[0] in 'aeiou' else 'a'} {kind} of {weights:,} parameters."]
    lines += ["", f"Generated by weft; needs only torch{' and kernels/' * kernels}. {usage}"]
    if program.cached:
        lines += [
            "`cache`, from `new_cache`, keeps what later tokens need of earlier ones: calls sharing it go on.",
            "With `last` [batch] only the logits of one token of each row are computed: [batch, 1, vocab].",
        ]
    return lines


def write_class_doc(method: Method, inner: Mapping[str, str], nodes: list[Node]) -> str:
    """Return a sentence on the class of `method`, which computes `nodes`; `inner` maps paths of modules to classes."""
    parts = list_calls(method)
    if method.path != TOP or not parts:
        phrases = [text for node in nodes if (text := _describe(node))]
        if phrases:
            return _punctuate(", ".join(dict.fromkeys(phrases)))
        middle = [n for n in nodes if n.op in ACTIVATION_NAMES]
        if middle and not parts:
            return _punctuate(f"a feed-forward with {ACTIVATION_NAMES[middle[0].op]}, {middle[0].output.width} wide")
    if not parts:
        return _punctuate("the whole model" if method.path == TOP else f"what `{method.path}` computes")
    if method.path == TOP:
        return _punctuate(f"the whole model: {_list_classes(parts, inner)}")
    if any(n.op is ops.route for n in nodes):
        return _punctuate(f"a router and what it sends tokens to: {_list_classes(parts, inner)}")
    if any(n.op in (ops.add, ops.add_norm) for n in nodes) and not any(p.path[-1].isdigit() for p in parts):
        return _punctuate(_describe_block(method, nodes, parts, inner))
    last = method.path.rpartition(".")[2]
    stack = "a layer" if last.isdigit() else f"the {last}"
    return _punctuate(f"{stack}: {_list_classes(parts, inner)}")


def _describe_block(method: Method, nodes: list[Node], parts: list[ModuleCall], inner: Mapping[str, str]) -> str:
    """Return a phrase on a block: its residual branches and the place of its norms (Xiong 2020, arXiv 2002.04745)."""
    places = {_classify_norm(n, method.path) for n in nodes if n.op in NORMS}
    style = next((text for asked, text in STYLES if asked == places), "a block")
    *first, last = (inner[p.path] for p in parts)
    if not first:
        return f"{style}: {last}, added to the residual stream"
    if _is_parallel(method, parts):
        return f"{style}: {', '.join(first)} and {last} side by side, both added to the residual stream"
    return f"{style}: {', '.join(first)}, then {last}, each added to the residual stream"


def _classify_norm(norm: Node, scope: str) -> str:
    """Return the placement of `norm` in the block at `scope`: "pre", "post" or "after". pre: only inner modules read
    its result. post: it normalizes the sum of the residual stream and a branch. after: neither of these, such as a norm
    of a module's output before it is added to the stream."""
    x = norm.inputs[0]
    readers = [reader for reader, _ in norm.output.uses]
    if readers and all(r.scope != scope and r.scope.startswith(f"{scope}.") for r in readers):
        return "pre"
    maker = None if x is None else x.producer
    return "post" if maker is not None and maker.op is ops.add and maker.scope == scope else "after"


def _is_parallel(method: Method, parts: list[ModuleCall]) -> bool:
    """Return whether the second of the calls `parts` does not depend on results of the first."""
    dependent = set(parts[0].results)
    for item in method.items:
        if item is parts[1]:
            return dependent.isdisjoint(iter_operands(item))
        if not dependent.isdisjoint(iter_operands(item)):
            dependent.update(item.results)
    return False


def _list_classes(parts: list[ModuleCall], inner: Mapping[str, str]) -> str:
    """Return the classes of the calls `parts` as an English list, such as ``Embedding, 12 × Block and Head``."""
    counts = Counter(inner[p.path] for p in parts)
    layers = {inner[p.path] for p in parts if p.path.rpartition(".")[2].isdigit()}
    *first, last = (f"{n} × {name}" if name in layers else name for name, n in counts.items())
    return f"{', '.join(first)} and {last}" if first else last


def _describe(node: Node) -> str:
    a = node.attrs
    if node.op is ops.attention:
        return _describe_attention(node)
    if node.op is ops.glu:
        return f"a feed-forward with {GATES.get(a['activation'], 'a gated unit')}, {node.output.width} wide"
    if node.op is ops.moe:
        asked = f", {a['active']} of them for a token" if a["active"] else ""
        return f"a mixture of {node.required_operand('up').shape[0]} experts{asked}"
    if node.op is ops.relative_position_bias:
        buckets, heads = node.required_operand("table").shape
        return f"T5's bias on the scores of {heads} heads, by the distance of query and key in {buckets} buckets"
    return DESCRIPTIONS.get(node.op, "")


def _describe_attention(node: Node) -> str:
    a, q = node.attrs, node.required_operand("q")
    heads, kv_heads = a["heads"], a["kv_heads"]
    text = "causal attention" if a["causal"] else "attention"
    grouped = f" with {heads} query heads and {kv_heads} key/value head{'s' if kv_heads > 1 else ''}"
    text += (f" with {heads} heads" if heads == kv_heads else grouped) + f" of width {q.width // heads}"
    if node.scope.rpartition(".")[2] == "cross":
        text += ", to an encoded text"
    if a["window"] is not None:
        text += f", within {a['window']} tokens"
    if a["value_dim"]:
        text += f", values being the first {a['value_dim']} numbers of keys (latent attention)"
    if a["softcap"] is not None:
        text += f", scores capped at {a['softcap']:g}"
    return text + (", with sinks" if node.operand("sinks") is not None else "")


def _punctuate(text: str) -> str:
    return text[0].upper() + text[1:] + "."
