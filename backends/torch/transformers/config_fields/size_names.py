"""Config fields for the sizes and attributes of a graph, named by their role as in configs of transformers, and sizes
as Python expressions over these fields.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Any

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.types import sizes
from weft.ir.types.sizes import Monomial, Poly, Size, SizeCall
from weft.passes.analysis.feed_forward import match_feed_forward

from .axes import Axis, AxisClasses, get_axis, list_read_params

CONFIG = "config"  # the variable of the config in generated code


@dataclass(frozen=True)
class ConfigValue:
    """A number that generated code reads from the config. value: the number. size: the expression over config fields.
    The str() and repr() of this object are the source of `size`, so that f-strings write it."""

    value: Any
    size: Size

    def __str__(self) -> str:
        return write_expression(self.size)

    __repr__ = __str__

    def __int__(self) -> int:
        return int(self.value)

    def __sub__(self, other: int) -> ConfigValue:
        return ConfigValue(self.value - other, self.size + -other)

    def __floordiv__(self, other: ConfigValue | int) -> ConfigValue | int:
        return _divide(self, other)

    def __rfloordiv__(self, other: int) -> ConfigValue | int:
        return _divide(other, self)


def _divide(a: ConfigValue | int, b: ConfigValue | int) -> ConfigValue | int:
    numerator, divisor = (x.size if isinstance(x, ConfigValue) else x for x in (a, b))
    size, value = sizes.floordiv(numerator, divisor), int(a) // int(b)
    return ConfigValue(value, size) if isinstance(size, Poly) else value


def write_expression(size: Size) -> str:
    """Return `size` as Python source that reads its fields from ``config``; sums and quotients are in parentheses."""
    if isinstance(size, int):
        return str(int(size))
    text = ""
    for mono, factor in size.terms:
        part = _write_product(mono, abs(factor))
        sign = "-" if factor < 0 else "+"
        text += f" {sign} {part}" if text else ("-" if factor < 0 else "") + part
    return text if len(size.terms) == 1 and "//" not in text else f"({text})"


def _write_product(mono: Monomial, factor: int) -> str:
    parts = [str(factor)] if factor != 1 or not mono else []
    for atom, power in sorted(mono, key=lambda factor: not str(factor[0]).startswith("num_")):
        base = _write_call(atom) if isinstance(atom, SizeCall) else f"{CONFIG}.{atom}"
        parts.append(base if power == 1 else f"{base} ** {power}")
    return " * ".join(parts)


def _write_call(call: SizeCall) -> str:
    arguments = [write_expression(a) for a in call.args]
    return f"({' // '.join(arguments)})" if call.fn == "floordiv" else f"{call.fn}({', '.join(arguments)})"


@dataclass
class Fields:
    """The config fields and their values, in order of first use. side: "encoder" while the sizes of the encoder of an
    encoder-decoder are named, else "decoder" or ""."""

    values: dict[str, Any] = field(default_factory=dict)
    side: str = ""

    def choose_name(self, role: str, value: Any, kind: str = "") -> str:
        """Return the name of the field for `role` with this `value`; add it to `values` if it is new.

        The name is the first of `role`, encoder_`role` (for `side` "encoder"), `kind`_`role` (for a `kind`), `role`_2,
        `role`_3, … that is new or has this value.
        """
        words = [w for w in (self.side, kind) if w not in ("", "decoder") and not role.startswith(w)]
        names = itertools.chain(  # transformers reads decoder_x as x
            [role], (f"{w}_{role}" for w in words), (f"{role}_{i}" for i in itertools.count(2))
        )
        name = next(name for name in names if self.values.get(name, value) == value)
        self.values.setdefault(name, value)
        return name

    def choose_size(self, role: str, value: int, kind: str = "") -> Poly:
        """Return the name that `choose_name` returns, as a symbolic size."""
        return sizes.sym(self.choose_name(role, value, kind))


FLOAT_FIELDS = {  # (op, float attribute): its config field
    (ops.rms_norm, "eps"): "rms_norm_eps",
    (ops.layer_norm, "eps"): "layer_norm_eps",
    (ops.attention, "softcap"): "attn_logit_softcapping",
    (ops.attention, "scale"): "attention_multiplier",
    (ops.route, "scale"): "routed_scaling_factor",
    (ops.glu, "limit"): "swiglu_limit",
}
SOFTCAP_DIVISION = "divided by final_logit_softcapping"
INT_FIELDS = {  # (op, int attribute): its config field
    (ops.attention, "window"): "sliding_window",
    (ops.attention, "keep_first"): "attention_keep_first",
    (ops.attention, "stride"): "attention_stride",
    (ops.attention, "value_dim"): "kv_lora_rank",
    (ops.moe, "active"): "num_experts_per_tok",
    (ops.route, "k"): "num_experts_per_tok",
    (ops.route, "groups"): "n_group",
    (ops.route, "top_groups"): "topk_group",
    (ops.relative_position_bias, "max_distance"): "relative_attention_max_distance",
}
PARAM_FIELDS = {"q_up_rank": "q_lora_rank", "dt_rank": "time_step_rank", "positions_size": "n_positions"}
LEAST = {"k": 1, "active": 1, "value_dim": 1}  # int attribute: the least value that gets a field, 2 for others


class SizeNames:
    """Expressions over config fields for axis sizes and node attributes of `graph`; they add fields to `fields`."""

    def __init__(self, graph: Graph, fields: Fields) -> None:
        self.axes, self.fields, self._attrs = AxisClasses(graph), fields, dict[tuple[Node, str], Size]()
        for name_axes in (_name_tokens, _name_attentions, _name_latents, _name_feed_forwards, _name_mixtures):
            name_axes(self.axes, fields)
        _name_recurrences(self.axes, fields)
        self.axes.deduce_names(fields.values)
        _name_remaining_widths(self.axes, fields)
        self.axes.deduce_names(fields.values)
        for node in graph.nodes:
            _name_attributes(self, node)
        for node, role in map_logit_nodes(graph).items():
            if role != SOFTCAP_DIVISION:
                self.name_attr(node, "by", sizes.sym(fields.choose_name(role, node.attrs["by"])))

    def name_attr(self, node: Node, attr: str, size: Size) -> None:
        """Store the expression `size` over config fields for the attribute `attr` of `node`."""
        self._attrs[node, attr] = size

    def get_size(self, value: Value, axis: int) -> ConfigValue | Size:
        """Return the size of an axis: a `ConfigValue` if it has an expression over fields, else the size."""
        size, named = value.shape[axis], self.axes.get_name((value, axis % len(value.shape)))
        return ConfigValue(size, named) if isinstance(named, Poly) else size

    def get_attr(self, node: Node, attr: str) -> Any:
        """Return an attribute of `node`: a `ConfigValue` if it has an expression over fields, else its value."""
        value, named = node.attrs[attr], self._attrs.get((node, attr))
        return ConfigValue(value, named) if isinstance(named, Poly) else value


# -- seeds


def _name_axis(axes: AxisClasses, fields: Fields, role: str, axis: Axis, kind: str = "") -> None:
    """Name the class of `axis` after the config field for `role` with the axis's size (see `Fields.choose_name`)."""
    axes.set_name(axis, fields.choose_size(role, axis[0].shape[axis[1]], kind))


def _name_tokens(axes: AxisClasses, fields: Fields) -> None:
    """Name the axes of the vocabulary, the residual stream, the token types and the encoder's hidden states."""
    for node in axes.graph.nodes:
        if node.op is ops.embedding and isinstance(table := node.required_operand("table"), Param):
            ids = node.required_operand("ids")
            if ids.name.endswith("input_ids"):
                _name_axis(axes, fields, "vocab_size", (table, 0))
                if not table.recipe.is_constant:
                    _name_axis(axes, fields, "hidden_size", (table, 1))
            elif ids.name.endswith("token_type_ids"):
                _name_axis(axes, fields, "type_vocab_size", (table, 0))
    if (memory := axes.graph.inputs.get("encoder_hidden_states")) is not None and isinstance(memory.width, int):
        same = fields.values.get("hidden_size", memory.width) == memory.width
        _name_axis(axes, fields, "hidden_size" if same else "encoder_hidden_size", get_axis(memory))
    if (logits := axes.graph.outputs.get("logits")) is not None and isinstance(logits.shape[-1], int):
        _name_axis(axes, fields, "vocab_size", get_axis(logits))


def _name_attentions(axes: AxisClasses, fields: Fields) -> None:
    for node in axes.graph.nodes:
        if node.op is not ops.attention:
            continue
        kind, (heads, kv_heads) = get_attention_kind(node), name_head_counts(node, fields)
        q, k, v = node.required_operand("q"), node.required_operand("k"), node.operand("v")
        width = fields.choose_size("head_dim", q.width // node.attrs["heads"], kind)
        axes.set_name(get_axis(q), heads * width)
        axes.set_name(get_axis(k), kv_heads * width)
        if v is None:
            value_width = fields.choose_size("kv_lora_rank", node.attrs["value_dim"])
        else:
            same = v.width // node.attrs["kv_heads"] == q.width // node.attrs["heads"]
            value_width = width if same else fields.choose_size("v_head_dim", v.width // node.attrs["kv_heads"], kind)
            axes.set_name(get_axis(v), kv_heads * value_width)
        axes.set_name(get_axis(node.output), heads * value_width)
        if (sinks := node.operand("sinks")) is not None:
            axes.set_name((sinks, 0), heads)


def _name_latents(axes: AxisClasses, fields: Fields) -> None:
    """Name the head widths of latent attention: rotated and plain features of queries and keys, values."""
    for node in axes.graph.nodes:
        above = find_attention(node.output) if node.op in (ops.rope, ops.head_linear) else None
        if above is not None and above[0].operand("v") is None:
            heads = name_head_counts(above[0], fields)[above[1] != "q"]
            if node.op is ops.rope:
                size = fields.choose_size("qk_rope_head_dim", node.output.width // node.attrs["heads"])
                axes.set_name(get_axis(node.output), heads * size)
            else:
                _name_head_linear(axes, fields, node, heads, "qk_nope_head_dim")
        below = node.required_operand("x").producer if node.op is ops.head_linear else None
        if below is not None and below.op is ops.attention and below.operand("v") is None:
            _name_head_linear(axes, fields, node, name_head_counts(below, fields)[0], "v_head_dim")


def _name_head_linear(axes: AxisClasses, fields: Fields, node: Node, heads: Any, role: str) -> None:
    """Name the axes of a map between the latent and the features `role` of each head."""
    weight, x = node.required_operand("weight"), node.required_operand("x")
    rank = fields.choose_size("kv_lora_rank", weight.shape[1])
    features = heads * fields.choose_size(role, weight.shape[0] // node.attrs["heads"])
    axes.set_name((weight, 0), features)
    axes.set_name((weight, 1), rank)
    axes.set_name(get_axis(x if node.attrs["inverse"] else node.output), features)


def name_head_counts(node: Node, fields: Fields) -> tuple[Any, Any]:
    """Return (query heads, key/value heads) of an attention as symbolic sizes, and add their fields to `fields`."""
    kind, heads, kv_heads = get_attention_kind(node), node.attrs["heads"], node.attrs["kv_heads"]
    queries = fields.choose_size("num_attention_heads", heads, kind)
    return queries, fields.choose_size("num_key_value_heads", kv_heads, kind)


def get_attention_kind(node: Node) -> str:
    """Return the prefix of an attention's config fields: "cross" if its scope is called so, else "local" with a window
    or pattern, else "global"."""
    if node.scope.rpartition(".")[2] == "cross":
        return "cross"
    return "local" if node.attrs["window"] is not None or node.attrs["pattern"] != "dense" else "global"


def _name_feed_forwards(axes: AxisClasses, fields: Fields) -> None:
    for node in axes.graph.nodes:
        unit = match_feed_forward(node) if node.op is ops.linear else None
        if unit is not None and not isinstance(unit, str):
            role = "shared_expert_intermediate_size" if "shared" in node.scope else "intermediate_size"
            axes.set_name(get_axis(node.required_operand("x")), fields.choose_size(role, unit.hidden))


def _name_mixtures(axes: AxisClasses, fields: Fields) -> None:
    for node in axes.graph.nodes:
        if node.op is ops.moe:
            _name_axis(axes, fields, "num_experts", (node.required_operand("up"), 0))
            _name_axis(axes, fields, "moe_intermediate_size", (node.required_operand("up"), 1))


def _name_recurrences(axes: AxisClasses, fields: Fields) -> None:
    for node in axes.graph.nodes:
        match node.op:
            case ops.selective_scan:
                _name_axis(axes, fields, "mamba_intermediate_size", get_axis(node.operand("x")))
                _name_axis(axes, fields, "state_size", get_axis(node.operand("b")))
            case ops.ssd:
                heads, groups = _name_recurrent_counts(node, fields)
                x, b = node.required_operand("x"), node.required_operand("b")
                axes.set_name(get_axis(x), heads * fields.choose_size("mamba_head_dim", x.width // node.attrs["heads"]))
                axes.set_name(get_axis(b), groups * fields.choose_size("state_size", b.width // node.attrs["groups"]))
                axes.set_name(get_axis(node.required_operand("delta")), heads)
            case ops.causal_conv:
                _name_axis(axes, fields, "conv_kernel", (node.required_operand("weight"), 1))
            case ops.linear_attention | ops.gated_linear_attention | ops.gated_delta_rule:
                heads, groups = _name_recurrent_counts(node, fields)
                q, k, v = (node.required_operand(n) for n in "qkv")
                shared = int(node.attrs.get("groups") or node.attrs["heads"])
                key = fields.choose_size("linear_key_head_dim", q.width // shared)
                value = fields.choose_size("linear_value_head_dim", v.width // node.attrs["heads"])
                for operand, size in ((q, groups * key), (k, groups * key), (v, heads * value)):
                    axes.set_name(get_axis(operand), size)
                if node.op is ops.gated_delta_rule:
                    axes.set_name(get_axis(node.operand("beta")), heads)
                axes.set_name(get_axis(node.output), heads * value)


def _name_recurrent_counts(node: Node, fields: Fields) -> tuple[Any, Any]:
    """Return (heads, groups) of a recurrence as symbolic sizes (1 stays 1), and add their fields to `fields`."""
    mamba = node.op is ops.ssd
    heads, groups = node.attrs["heads"], int(node.attrs.get("groups") or node.attrs["heads"])
    named = fields.choose_size("mamba_num_heads" if mamba else "linear_num_value_heads", heads) if heads > 1 else 1
    if groups == heads:
        return named, named
    return named, fields.choose_size("n_groups" if mamba else "linear_num_key_heads", groups) if groups > 1 else 1


def _name_remaining_widths(axes: AxisClasses, fields: Fields) -> None:
    """Name the unnamed axes of linear weights: a weight x has x_rank inputs and x_size outputs. Then name the unnamed
    axes of other parameters, except constants: x_size for the first axis, x_width for others."""

    def name_param(param: Param, axis: int, ending: str) -> None:
        if axes.get_name((param, axis)) is None and axes.get_size((param, axis)):
            stem = param.name.removesuffix(".weight").rpartition(".")[2]
            _name_axis(axes, fields, PARAM_FIELDS.get(role := f"{stem}_{ending}", role), (param, axis))

    for axis, ending in ((1, "rank"), (0, "size")):
        for node in axes.graph.nodes:
            if node.op is ops.linear and isinstance(weight := node.operand("weight"), Param):
                name_param(weight, axis, ending)
                axes.deduce_names(fields.values)
    for param in list_read_params(axes.graph):
        for axis in range(0 if param.recipe.is_constant else len(param.shape)):
            name_param(param, axis, "size" if axis == 0 else "width")


# -- attributes


def _name_attributes(names: SizeNames, node: Node) -> None:
    fields = names.fields
    for (op, attr), role in FLOAT_FIELDS.items():
        real = node.op is op and isinstance(node.attrs[attr], float)
        if real and (attr == "eps" or node.attrs[attr] != op.attrs[attr].default):
            names.name_attr(node, attr, sizes.sym(fields.choose_name(role, node.attrs[attr], _get_field_prefix(node))))
    for (op, attr), role in INT_FIELDS.items():
        if node.op is op and isinstance(value := node.attrs[attr], int) and value >= LEAST.get(attr, 2):
            if role == "attention_stride" and node.attrs["pattern"] == "chunked":
                role = "attention_chunk_size"
            names.name_attr(node, attr, fields.choose_size(role, value))
    for attr, count in _name_counts(node, fields).items():
        names.name_attr(node, attr, count)


def map_logit_nodes(graph: Graph) -> dict[Node, str]:
    """Map nodes after the head: the logit scale and the soft cap's product to their config fields, the soft cap's
    division to SOFTCAP_DIVISION. Return {} unless only a scale, a soft cap, or both in this order follow the head."""
    chain: list[Node] = []
    node = graph.outputs["logits"].producer if "logits" in graph.outputs else None
    while node is not None and node.op is not ops.linear:
        if node.op not in (ops.affine, ops.tanh) or node.attrs.get("plus", 0) != 0:
            return {}
        chain.insert(0, node)
        node = node.required_operand("x").producer
    softcap: dict[Node, str] = {}
    if [n.op for n in chain[-3:]] == [ops.affine, ops.tanh, ops.affine]:
        first, _, final = chain[-3:]
        if abs(first.attrs["by"] * final.attrs["by"] - 1) > 1e-9:
            return {}
        softcap = {first: SOFTCAP_DIVISION, final: "final_logit_softcapping"}
        del chain[-3:]
    if len(chain) > 1 or (chain and chain[0].op is not ops.affine):
        return {}
    return {**dict.fromkeys(chain, "logit_scale"), **softcap}


def _get_field_prefix(node: Node) -> str:
    """Return the prefix of config fields of `node`: its kind for an attention, else its local name without number."""
    local = re.sub(r"_\d+$", "", node.output.name.rpartition(".")[2])
    return get_attention_kind(node) if node.op is ops.attention else local


def find_attention(value: Value, depth: int = 6) -> tuple[Node, str] | None:
    """Return (attention, operand name) for the first attention that reads `value`, directly or through up to `depth`
    layout, norm or scale ops; None without one."""
    for reader, index in value.uses:
        if reader.op is ops.attention:
            return reader, reader.op.operands[index].name
        moves = depth > 0 and reader.op in (ops.reshape, ops.concat, ops.transpose, ops.rms_norm, ops.affine)
        if moves and (match := find_attention(reader.output, depth - 1)) is not None:
            return match
    return None


def _name_counts(node: Node, fields: Fields) -> dict[str, Any]:
    """Return attribute → symbolic size of the head counts of `node` ({} without any), and add their fields to `fields`.
    A RoPE has the fields of the attention that reads its result, if the counts are equal."""
    match node.op:
        case ops.attention:
            return dict(zip(("heads", "kv_heads"), name_head_counts(node, fields), strict=True))
        case ops.rope if (match := find_attention(node.output)) is not None:
            attention, role = match
            heads, kv_heads = name_head_counts(attention, fields)
            same = node.attrs["heads"] == attention.attrs["heads" if role == "q" else "kv_heads"]
            return {"heads": heads if role == "q" else kv_heads} if same else {}
        case ops.ssd | ops.linear_attention | ops.gated_linear_attention | ops.gated_delta_rule:
            counts = zip(("heads", "groups"), _name_recurrent_counts(node, fields), strict=True)
            return {attr: count for attr, count in counts if attr in node.attrs}
    return {}
