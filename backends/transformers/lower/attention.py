"""Softmax attention by the attention functions of transformers, with its caches and masks."""

from __future__ import annotations


from weft.ir import ops
from weft.ir.graph import Node, Value

from ...torch.ops.elementwise import number
from ...torch.ops.masks import is_dense, seen_keys
from ...torch.program.statements import Operand, Statement, Submodule, Var
from .emitter import CACHE, CHUNKED, FULL, INDEX, RECURRENT, SLIDING, STANDARD, Attending, Mask, ShellEmitter, lowers

FETCH = "ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, {eager})"


@lowers(ops.attention)
def _attention(e: ShellEmitter, node: Node) -> Operand:
    a, width = node.attrs, node.required("q").width
    heads, kv_heads = a["heads"], a["kv_heads"]
    q, k = e.heads(node.required("q"), heads, "q"), e.heads(node.required("k"), kv_heads, "k")
    v = (
        e.heads(node.required("v"), kv_heads, "v")
        if not a["value_dim"]
        else e.emit(f"{{0}}[..., :{a['value_dim']}]", k, name="v")
    )
    mask = mask_of(e, node)
    scale = number(a["scale"]) if a["scale"] is not None else f"{factor(width // heads)} ** -0.5"
    told = Attending(node, scale, "1" if heads == kv_heads else f"{heads // kv_heads}".strip("()"))
    operands: list[Value | Operand] = [q, k, v, mask]
    more = _scored(node, told, operands)
    if _alone(node):
        return _inline(e, node, told, operands, more)
    place = node.output.name.rpartition(".")[2]
    path = f"{node.scope}.{place}" if node.scope else place
    order = [n for n in e.graph.nodes if n.scope == node.scope and n.op is ops.attention].index(node)
    index = f"layer_idx + {order}" if order else "layer_idx"
    leaf = Submodule(path, f"SoftmaxAttention(config, {index}, {told.groups}, {told.scaling})")
    given = "".join(f", {text}" for text in more)
    text = f"{{{len(operands)}}}({{0}}, {{1}}, {{2}}, {{3}}{given}, {{{len(operands) + 1}}}, **kwargs)"
    made = e.emit(text, *operands, leaf, CACHE, name="x")
    _tell(e, told)
    return made


def _alone(node: Node) -> bool:
    """Return whether no other attention stands in the scope of `node`."""
    return sum(n.scope == node.scope and n.op is ops.attention for n in node.graph.nodes) == 1


def _scored(node: Node, told: Attending, operands: list[Value | Operand]) -> list[str]:
    """The keyword arguments of an attention whose scores are more than products, and of one with a window."""
    more = []
    if node.attrs["softcap"] is not None:
        told.features.add("softcap")
        more.append(f"softcap={number(node.attrs['softcap'])}")
    for name, operand in (("s_aux", "sinks"), ("position_bias", "bias")):
        if (value := node.operand(operand)) is not None:
            told.features.add(name)
            more.append(f"{name}={{{len(operands)}}}")
            operands.append(value)
    if node.attrs["window"] is not None and is_dense(node) and not node.attrs["keep_first"]:
        told.features.add("sliding_window")
        more.append(f"sliding_window={node.attrs['window']}")
    return more


def _inline(e: ShellEmitter, node: Node, told: Attending, operands: list[Value | Operand], more: list[str]) -> Operand:
    """Attention in the module that has its projections."""
    q, k, v, *rest = operands
    if node in e.cached:
        text = "({2}, {3}) if {0} is None else {0}.update({2}, {3}, {1})"
        k, v = e.many(text, CACHE, INDEX, k, v, names=("k", "v"))
    eager = "eager_scored_attention" if told.features - {"sliding_window"} else "eager_attention"
    attend = e.emit(FETCH.format(eager=eager), name="attention_interface")
    given = "".join(f", {text}" for text in more)
    text = "{KEY}(self, {0}, {1}, {2}, {3}, scaling=self.scaling{GIVEN}, **kwargs)"
    text = text.replace("{KEY}", f"{{{len(operands)}}}").replace("{GIVEN}", given)
    x, _ = e.many(text, q, k, v, *rest, attend, names=("x", "weights"))
    _tell(e, told)
    return e.emit("{0}.reshape(*{1}.shape[:-1], -1)", x, _entered(node), name="x", replaces=0)


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
        before = value.producer.required(value.producer.op.operands[0].name)
        if len(before.shape) != len(value.shape) and value.producer.op is not ops.reshape:
            break
        value = before
    return value if len(value.shape) == 3 else node.required("q")


def factor(x: int) -> str:
    """`x` as a factor or the base of a power."""
    text = str(x)
    return f"({text})" if " " in text and not text.startswith("(") else text


# -- masks


def mask_of(e: ShellEmitter, node: Node) -> Var:
    """The mask of an attention, which all that see the same keys share."""
    kind, condition = kind_of(e, node)
    key = kind, condition
    if key not in e.masks:
        name = "mask" if kind == FULL else kind.split("_")[0] + "_mask"
        given = (e.embeds, e.attention_mask, e.past, e.positions)
        made = e.hoist(("mask", key), "...", *given, name=name)
        made.type = "Tensor | None"
        statement = next(s for s in e.program.statements if made in s.results)
        e.masks[key] = Mask(kind, condition, statement)
    e.masks[key].nodes.append(node)
    return e.masks[key].statement.results[0]


def kind_of(e: ShellEmitter, node: Node) -> tuple[str, str]:
    """The kind of the mask of an attention, and the conditions beside causality where no kind of transformers has
    them."""
    a = node.attrs
    if a["pattern"] == "dense" and a["window"] is None:
        return FULL, ""
    if not a["keep_first"] and node.operand("bias") is None:
        if a["pattern"] == "dense" and a["window"] == e.fields.values.get("sliding_window"):
            return SLIDING, ""
        if (
            a["pattern"] == "chunked"
            and a["window"] is None
            and a["stride"] == e.fields.values.get("attention_chunk_size")
        ):
            return CHUNKED, ""
    word = "window" if a["pattern"] == "dense" else a["pattern"]
    condition = seen_keys(node).format("q", "k")
    taken = {mask.kind for mask in e.masks.values() if mask.condition != condition}
    name = next(n for n in (f"{word}_attention", *(f"{word}_{i}_attention" for i in range(2, 999))) if n not in taken)
    return name, condition


def finish_masks(e: ShellEmitter) -> str:
    """Say how masks are made, now that all are known; return the function that makes them, "" if transformers' own
    is called."""
    kinds = {mask.kind: mask for mask in e.masks.values()}
    arguments = "self.config, {0}, {1}, {2}, {3}"
    if len(kinds) <= 1 and all(kind in STANDARD and kind != RECURRENT for kind in kinds):
        for kind, mask in kinds.items():
            mask.statement.text = f"{STANDARD[kind]}({arguments})"
        return ""
    masks = Var("masks", type="dict[str, Any]")
    first = next(iter(kinds.values())).statement
    whole = Statement(f"attention_masks({arguments})", first.operands, (masks,), first.scope, early=True)
    e.program.statements.insert(e.program.statements.index(first), whole)
    for kind, mask in kinds.items():
        mask.statement.text, mask.statement.operands = f'{{0}}["{kind}"]', (masks,)
    return _masks_function([*kinds.values()])


def _masks_function(masks: list[Mask]) -> str:
    """A function of the whole model that makes all its masks."""
    lines = [
        "def attention_masks(",
        "    config: Any,",
        "    inputs_embeds: Tensor,",
        "    attention_mask: Any,",
        "    past_key_values: Cache | None,",
        "    position_ids: Tensor | None,",
        "    **kwargs: Any,",
        ") -> dict[str, Any]:",
        '    """The masks of all kinds of layers, for a call with inputs_embeds [batch, seq, width]; `attention_mask` [batch,',
        '    past + seq] hides padding, or is what this function made before."""',
        "    if isinstance(attention_mask, dict):",
        "        return attention_mask",
        "    given = (config, inputs_embeds, attention_mask, past_key_values, position_ids)",
    ]
    custom = [mask for mask in masks if mask.kind not in STANDARD]
    if any(mask.condition for mask in custom):
        lines.append("    first = first_tokens(inputs_embeds, attention_mask)")
    for mask in custom:
        name = mask.kind
        lines += [
            "",
            f"    def {name}(batch: Any, head: Any, q: Any, k: Any) -> Any:",
            "        q, k = q - first[batch], k - first[batch]",
            f"        return {mask.condition}",
        ]
    lines += ["", "    return {"]
    for mask in masks:
        if mask.kind in STANDARD:
            lines.append(f'        "{mask.kind}": {STANDARD[mask.kind]}(*given),')
        else:
            lines.append(f'        "{mask.kind}": create_causal_mask(*given, and_mask_function={mask.kind}),')
    return "\n".join([*lines, "    }"])
