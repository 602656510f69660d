"""Softmax attention by the attention functions of transformers, with its caches and masks."""

from __future__ import annotations

from collections.abc import Collection

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Node, Value
from weft.passes.analysis.states import keeper

from ...ops.elementwise import number
from ...ops.masks import is_dense
from ...program.statements import Operand, Statement, Submodule, Var
from .emitter import CACHE, INDEX, Attending, ShellEmitter, first_operand, lowers, nearest_param
from .masks import mask_of

FETCH = "ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, {eager})"


@lowers(ops.attention)
def _attention(e: ShellEmitter, node: Node) -> Operand | None:
    if not of_texts(node):
        return None  # runs of tokens with masks of their own: PyTorch's operator, as in plain modules
    a, width = node.attrs, e.size_of(node.required("q"))
    heads, kv_heads = e.attr(node, "heads"), e.attr(node, "kv_heads")
    q, k = e.heads(node.required("q"), heads, "q"), e.heads(node.required("k"), kv_heads, "k")
    # Keys that are values too are given as both: caches of engines have one width.
    v = k if a["value_dim"] else e.heads(node.required("v"), kv_heads, "v")
    mask = mask_of(e, node)
    scale = number(e.attr(node, "scale")) if a["scale"] is not None else f"{factor(width // heads)} ** -0.5"
    told = Attending(node, scale, "1" if a["heads"] == a["kv_heads"] else f"{heads // kv_heads}".strip("()"))
    operands: list[Value | Operand] = [q, k, v, mask]
    more = _scored(e, node, told, operands)
    if _alone(node) and not e.apart:
        return _inline(e, node, told, operands, more)
    if node in e.crosses:
        operands[1:3] = _crossed(e, k, v)
    place = next(
        n for n in node.graph.nodes if n.scope == node.scope and n.op is ops.attention and _weights(n) == _weights(node)
    )
    path = place.output.name
    kept = node in e.cached
    order = [*_kinds_in(node, e.cached)].index(_weights(node)) if kept else 0
    index = (f"layer_idx + {order}" if order else "layer_idx") if kept and not e.shared else "None"
    causal = "" if told.causal else ", is_causal=False"
    leaf = Submodule(path, f"SoftmaxAttention(config, {index}, {told.groups}, {told.scaling}{causal})")
    given = "".join(f", {text}" for text in more)
    last = len(operands)
    past = f", past_key_values={e.own(f'{{{last + 1}}}')}" if kept else ""
    past += f", layer_idx={{{last + 2}}}" if kept and e.shared else ""
    text = f"{{{last}}}({{0}}, {{1}}, {{2}}, {{3}}{given}{past}, **kwargs)"
    made = e.emit(text, *operands, leaf, *([CACHE, INDEX] if kept and e.shared else [CACHE] if kept else []), name="x")
    _tell(e, told)
    return made


@lowers(ops.lightning_index)
def _lightning_index(e: ShellEmitter, node: Node) -> Operand:
    raise WeftError(
        f"target transformers keeps no keys by which queries choose others: %{node.output.name} needs the target torch"
    )


def of_texts(node: Node) -> bool:
    """Return whether the queries of an attention are the tokens of texts, a row each."""
    return node.required("q").shape[0] in {value.shape[0] for value in node.graph.inputs.values()}


def _alone(node: Node) -> bool:
    """Return whether no other attention stands in the scope of `node`: the same one again is none."""
    return len(_kinds_in(node)) == 1


def _kinds_in(node: Node, among: Collection[Node] | None = None) -> dict[tuple[Value, ...], None]:
    """The attentions in the scope of `node`, or those `among` them, by the weights that their queries are made with."""
    alike = (n for n in node.graph.nodes if n.scope == node.scope and n.op is ops.attention)
    return dict.fromkeys(_weights(n) for n in alike if among is None or n in among)


def _weights(node: Node) -> tuple[Value, ...]:
    """The parameters nearest to the operands of an attention; the operands themselves where there are none."""
    return tuple(nearest_param(v) for v in node.inputs[:3] if v is not None)


def _scored(e: ShellEmitter, node: Node, told: Attending, operands: list[Value | Operand]) -> list[str]:
    """The keyword arguments of an attention whose scores are more than products, and of one with a window."""
    more = []
    if node.attrs["softcap"] is not None:
        told.features.add("softcap")
        more.append(f"softcap={number(e.attr(node, 'softcap'))}")
    for name, operand in (("s_aux", "sinks"), ("position_bias", "bias")):
        if (value := node.operand(operand)) is not None:
            told.features.add(name)
            more.append(f"{name}={{{len(operands)}}}")
            operands.append(value)
    if node.attrs["window"] is not None and is_dense(node) and not node.attrs["keep_first"]:
        told.features.add("sliding_window")
        more.append(f"sliding_window={e.attr(node, 'window')}")
    return more


def _inline(e: ShellEmitter, node: Node, told: Attending, operands: list[Value | Operand], more: list[str]) -> Operand:
    """Attention in the module that has its projections."""
    q, k, v, *rest = operands
    if node in e.cached:
        assert isinstance(k, Var) and isinstance(v, Var)
        own = k, v
        k, kept_v = e.all_keys(node, lambda: updated(e, *own))
        v = kept_v or v
    elif node in e.crosses:
        k, v = _crossed(e, k, v)
    eager = "eager_scored_attention" if told.features - {"sliding_window"} else "eager_attention"
    attend = e.emit(FETCH.format(eager=eager), name="attention_interface")
    # One that reads another's cache has a number and a kind, too: engines with caches of their own go by these.
    numbered = (CACHE, INDEX) if node in e.cached and keeper(node) is not node else ()
    given = "".join(f", {text}" for text in more)
    text = "{KEY}(self, {0}, {1}, {2}, {3}, scaling=self.scaling{GIVEN}, **kwargs)"
    text = text.replace("{KEY}", f"{{{len(operands)}}}").replace("{GIVEN}", given)
    x, _ = e.many(text, q, k, v, *rest, attend, *numbered, names=("x", "weights"))
    _tell(e, told)
    entered, latent = _entered(node), e.attr(node, "value_dim")
    if latent:
        whole = e.size_of(node.required("k")) // e.attr(node, "kv_heads")
        return e.emit(f"{{0}}.reshape(*{{1}}.shape[:-1], -1, {whole})[..., :{latent}].flatten(2)", x, entered, name="x")
    return e.emit("{0}.reshape(*{1}.shape[:-1], -1)", x, entered, name="x", replaces=0)


def updated(e: ShellEmitter, k: Value | Operand, v: Value | Operand) -> tuple[Var, Var]:
    """Keys and values of a text behind those of earlier calls; pages (continuous batching) read and change `kwargs`."""
    own = ".self_attention_cache" if e.crosses else ""
    text = f"({{2}}, {{3}}) if {{0}} is None else {{0}}{own}.update({{2}}, {{3}}, {{1}}, kwargs=kwargs)"
    made = e.many(text, CACHE, INDEX, k, v, names=("k", "v"))
    return made[0], made[1]


def _crossed(e: ShellEmitter, k: Value | Operand, v: Value | Operand) -> tuple[Value | Operand, ...]:
    """Keys and values of a source, made by the first call of a text."""
    if not e.cached:
        return k, v
    assert isinstance(k, Var) and isinstance(v, Var)
    text_k, made_k = e.folded(k, 2)
    text_v, made_v = e.folded(v, 2 + len(made_k))
    text = f"crossed({{0}}, {{1}}, lambda: ({text_k}, {text_v}))"
    made = e.many(text, CACHE, INDEX, *made_k, *made_v, names=("k", "v"))
    e.crossed.add(e.program.statements[-1])
    return made


def _tell(e: ShellEmitter, told: Attending) -> None:
    """Note what the last statement is; its softmax is handed to the block around, where transformers records it."""
    statement, node = e.program.statements[-1], told.node
    e.attending[statement] = told
    outer = node.scope.rpartition(".")[0]
    if len(statement.results) == 2 and outer:
        e.program.statements.append(Statement("", statement.results[1:], (), outer))


def _entered(node: Node) -> Value:
    """A value [batch, seq, ...] that the queries are made of."""
    value = node.required("q")
    while value.producer is not None and value.producer.scope == node.scope and len(value.producer.inputs) > 0:
        before = first_operand(value.producer)
        if len(before.shape) != len(value.shape) and value.producer.op is not ops.reshape:
            break
        value = before
    return value if len(value.shape) == 3 else node.required("q")


def factor(x: object) -> str:
    """`x` as a factor or the base of a power."""
    text = str(x)
    return f"({text})" if " " in text and not text.startswith("(") else text
