"""Labels and kinds of parts; a kind has a colour and a name in the legend."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .network import CHANGED, KEPT, SIGNS, Vertex, count_signs, find_common_sign, sign_to_kind
from .outline import PicturePart

KINDS = {
    "stream": "residual stream",
    "embedding": "embedding, output",
    "norm": "norm",
    "attention": "attention",
    "position": "position",
    "feed-forward": "feed-forward",
    "experts": "experts",
    "recurrence": "recurrence",
    "linear": "linear map",
    "tensor": "other",
    "group": "parts of several kinds",
    "input": "input, result",
}
MEANINGS = KINDS | {sign_to_kind(sign): sign for sign in SIGNS}
_KIND_OPS = {
    "embedding": "embedding embed_tokens",
    "norm": "rms_norm layer_norm add_norm",
    "attention": "attention relative_attention block_sparse_attention lightning_index norm_qkv latent_qk",
    "position": "rope alibi relative_position_bias rotary_angles",
    "feed-forward": "glu norm_glu gelu relu relu2 swish elu tanh sigmoid softplus",
    "experts": "moe route expert_choice limit_capacity mixture norm_route choose_experts",
    "recurrence": "selective_scan ssd causal_conv scan gated_linear_attention gated_delta_rule linear_attention "
    "gated_selective_scan gated_ssd matrix_recurrence",
    "linear": "linear head_linear matmul conv1d norm_linear linear_residual",
    "input": "input output",
    "stream": "add",
}
_KIND = {op: kind for kind, ops in _KIND_OPS.items() for op in ops.split()}
_TITLE = {
    "embedding": "Embedding", "rms_norm": "RMSNorm", "layer_norm": "LayerNorm", "add_norm": "Add & norm",
    "norm_linear": "Norm & linear", "linear": "Linear", "head_linear": "Linear per head", "matmul": "Matrix product",
    "rope": "RoPE", "alibi": "ALiBi", "relative_position_bias": "Relative position bias", "glu": "GLU",
    "gelu": "GELU", "relu": "ReLU", "relu2": "ReLU²", "swish": "Swish", "elu": "ELU", "tanh": "tanh",
    "sigmoid": "Sigmoid", "softplus": "Softplus", "moe": "Experts", "route": "Router's choice",
    "scan": "Recurrence",
    "selective_scan": "Selective scan", "ssd": "State space dual", "causal_conv": "Causal convolution",
    "conv1d": "Convolution",
    "gated_linear_attention": "Gated linear attention", "linear_attention": "Linear attention",
    "gated_delta_rule": "Gated delta rule",
    "lightning_index": "Choice of keys",
    "embed_tokens": "Embedding & angles", "norm_qkv": "Norm, Q, K, V", "latent_qk": "Latent Q, K",
    "rotary_angles": "Angles of RoPE", "linear_residual": "Linear & residual", "norm_route": "Norm & router",
    "choose_experts": "Router's choice", "mixture": "Chosen experts", "gated_selective_scan": "Gated selective scan",
    "gated_ssd": "Gated state space dual", "matrix_recurrence": "Gated linear attention", "pack": "Packed weights",
    "relative_attention": "Relative attention", "split": "Split", "concat": "Concat", "affine": "Scale",
    "add": "Sum", "mul": "Product", "sub": "Difference", "div": "Quotient",
}  # fmt: skip
_GATED = {
    "silu": "SwiGLU", "gelu": "GEGLU", "gelu_tanh": "GEGLU", "relu": "ReGLU", "sigmoid": "GLU", "identity": "Bilinear",
}  # fmt: skip
LONGEST = 48  # characters of a formula on a card
SYMBOLS = {"add": "+", "mul": "×", "sub": "−", "div": "÷"}
RECURRENT = {
    "selective_scan": "Mamba", "ssd": "Mamba-2", "gated_linear_attention": "Gated linear attention",
    "gated_delta_rule": "Gated DeltaNet", "linear_attention": "Linear attention", "scan": "Recurrence",
    "gated_selective_scan": "Mamba", "gated_ssd": "Mamba-2", "matrix_recurrence": "Gated linear attention",
}  # fmt: skip
NUMBERED = re.compile(r"\d+(-\d+)?")  # the name of a layer, of a repeat, of one time of a repeat


@dataclass(frozen=True)
class Label:
    """A title and the lines under it, or a circle with a `symbol` (+, ×, −, ÷). `kind`: a key of MEANINGS."""

    title: str
    lines: tuple[str, ...]
    kind: str
    symbol: str = ""


def label_part(part: PicturePart) -> Label:
    """Return the label that `part` has when it is closed."""
    return _apply_sign(part, _add_bits(part, _label_leaf(part) if part.vertices else _label_group(part)))


def _add_bits(part: PicturePart, text: Label) -> Label:
    """Return `text` with a line about quantized weights, if any: bits per weight, and the packing if all share one."""
    packed = {w.name: w for v in part.all_vertices() for w in v.weights if w.bits is not None}.values()
    bits = sorted({w.bits for w in packed if w.bits is not None})
    if not bits or text.symbol:
        return text
    words = f"{bits[0]:.3g} bits" if len(bits) == 1 else f"{bits[0]:.3g} to {bits[-1]:.3g} bits"
    if len(kinds := {w.packing.removesuffix(" with zero points") for w in packed}) == 1:
        words += f", {kinds.pop().replace(', groups', ' groups')}"
    return replace(text, lines=(*text.lines, words))


def _apply_sign(part: PicturePart, text: Label) -> Label:
    """Return `text` with the sign of `part` as kind, and lines about changes unless "kept"; `text` if not compared."""
    marks = [v.mark for v in part.all_vertices()]
    sign = find_common_sign(marks)
    if sign in ("", KEPT):
        return replace(text, kind=sign_to_kind(sign)) if sign else text
    words = dict.fromkeys(word for v in part.vertices if v.mark for word in v.mark.words)
    alike = all(mark is None or mark.sign == sign for mark in marks)
    plain = sign if alike and (part.vertices or sign != CHANGED) else count_signs(marks)
    return replace(text, kind=sign_to_kind(sign), lines=(*text.lines, *(words or [plain])))


def _label_leaf(part: PicturePart) -> Label:
    v = part.vertices[0].weft_op
    kind = _KIND.get(v.op, "tensor")
    if v.op in ("input", "output"):
        return Label(part.name, v.types[:1], kind)
    if v.op in SYMBOLS and len(v.reads) == 2:
        return Label(part.name, (), "stream" if v.op == "add" else "tensor", SYMBOLS[v.op])
    return Label(choose_title(v), (part.name, *filter(None, [describe_sizes(v)])), kind)


def choose_title(v: Vertex) -> str:
    """Return the title of an operation, such as "RMSNorm" or "SwiGLU"; its operator if it has no title."""
    if v.attends:
        return name_attention(v)
    if v.op in ("glu", "norm_glu"):
        return _GATED.get(v.text("activation", "silu"), "Gated unit")
    return _TITLE.get(v.op, v.op)


def name_attention(v: Vertex) -> str:
    """Return the usual name of a softmax attention ("Latent attention"), in most cases by its numbers of heads."""
    heads, kv = int(v.attrs.get("heads", 1)), int(v.attrs.get("kv_heads") or v.attrs.get("heads", 1))
    if v.op == "relative_attention":
        return "Relative attention"
    if v.op == "block_sparse_attention":
        return "Block-sparse attention"
    if v.attrs.get("value_dim"):
        return "Latent attention"
    return "Multi-head attention" if kv == heads else "Multi-query attention" if kv == 1 else "Grouped-query attention"


def describe_sizes(v: Vertex) -> str:
    """Return the main sizes of an operation ("9 heads, 3 KV heads", "576 to 1,536"), or a scan's formula; else ""."""
    if v.attends:
        return " · ".join(_list_attention_facts(v))
    if v.op in ("linear", "embedding") and v.weights:
        rows, width = map(_format_number, v.weights[0].dims)
        return f"{width} to {rows}" if v.op == "linear" else f"{rows} × {width}"
    if v.op == "moe":
        return _describe_experts(v)
    if v.op == "scan":
        first, *rest = str(v.attrs.get("step", "")).split("\n")
        return first if len(first) <= LONGEST and len(rest) < 3 else f"{1 + len(rest)} formulas for a token"
    if v.op == "lightning_index":
        return f"{v.attrs.get('heads')} heads · top {v.attrs.get('top_k')}"
    if v.op == "route":
        return f"top {v.attrs.get('k', 1)}"
    return ""


def _list_attention_facts(v: Vertex) -> Iterable[str]:
    heads, kv = v.attrs.get("heads"), v.attrs.get("kv_heads")
    yield f"{heads} heads" if not kv or kv == heads or kv == "1" else f"{heads} heads, {kv} KV heads"
    if window := v.attrs.get("window"):
        yield f"window {_format_number(window)}"
    if block := v.attrs.get("block"):
        yield f"blocks of {_format_number(block)}"
    if (pattern := v.text("pattern", "dense")) != "dense":
        yield pattern
    if "sinks" in [*v.roles, *(w.name.rpartition(".")[2] for w in v.weights)]:
        yield "sinks"
    if cap := v.attrs.get("softcap"):
        yield f"soft cap {cap}"


def _describe_experts(v: Vertex) -> str:
    experts = v.weights[0].dims[0] if v.weights else "?"
    active = v.attrs.get("active")
    return f"{experts} experts" + (f", {active} active" if active else "")


def _label_group(part: PicturePart) -> Label:
    """Return the label of a group, named as in papers if its operations reveal its role, else by its own name."""
    if not part.path:
        return Label(part.name, (_list_contents(part),), "group")
    if NUMBERED.fullmatch(part.name):
        return Label(_name_layers(part), (_list_contents(part),), "group")
    if any(p.count > 1 or p.name.isdigit() for p in part.parts()):  # an encoder, a decoder
        return Label(part.name.capitalize(), (_list_contents(part),), "group")
    inside = {label_part(child).kind for child in part.body.children if not child.vertices}
    if inside & {"attention", "recurrence"} and inside & {"feed-forward", "experts"}:
        return Label("Block", (part.name, _list_contents(part)), "group")
    vertices = [v.weft_op for v in part.all_vertices()]
    ops = {v.op: v for v in reversed(vertices)}
    nested = any(child.children for child in part.children)
    if "moe" in ops:
        lines = [_describe_experts(ops["moe"]), *(["shared expert"] if nested else [])]
        return Label("Mixture of experts", (part.name, " · ".join(lines)), "experts")
    attention = next((v for v in ops.values() if v.attends), None)
    if attention is not None:
        rotary = ["RoPE"] if "rope" in ops or "rotary" in attention.attrs else []
        facts = " · ".join([*_list_attention_facts(attention), *rotary])
        title = "Multi-head latent attention" if attention.attrs.get("value_dim") else name_attention(attention)
        title = "Cross-attention" if part.name.startswith("cross") else title
        return Label(title, (part.name, facts), "attention")
    if recurrent := next((op for op in RECURRENT if op in ops), ""):
        sizes = describe_sizes(ops[recurrent]) or _TITLE[recurrent].lower()
        return Label(RECURRENT[recurrent], (part.name, sizes), "recurrence")
    if "Attention" in ops or ("Softmax" in ops and [v.op for v in vertices].count("matmul") > 1):
        return Label("Attention", (part.name,), "attention")
    units = [v for v in vertices if _KIND.get(v.op) == "feed-forward"]
    unit = next((v for op in ("glu", "norm_glu", "swish") for v in units if v.op == op), units[0] if units else None)
    if unit is not None and {"linear", "norm_linear", "norm_glu"} & ops.keys():
        name, hidden = choose_title(unit), unit.types[0].rstrip("]").rpartition(", ")[2]
        title = f"{name} feed-forward" if unit.op.endswith("glu") else f"Feed-forward, {name}"
        lines = [f"hidden {_format_number(hidden)}"] if hidden.isdigit() else []
        return Label(title, (part.name, *lines), "feed-forward")
    return Label(part.name, (_list_contents(part),), "group")


def _name_layers(part: PicturePart) -> str:
    """Return the title of a layer or repeat: its numbers, then properties ("layers 0-29 · window 512")."""
    stem = part.path.rpartition(".")[0].rpartition(".")[2] or "layers"
    stem = stem.removesuffix("s") if part.name.isdigit() else stem if stem[-1] == "s" or len(stem) == 1 else f"{stem}s"
    if any(child.count > 1 or child.name.isdigit() for child in part.children if len(part.children) > 1):
        return f"{stem} {part.name}"
    vertices = [v.weft_op for v in part.all_vertices()]
    windows = {v.attrs["window"] for v in vertices if "window" in v.attrs}
    tags = [part.reach] if part.reach else []
    tags += [f"window {_format_number(w)}" for w in windows] if len(windows) == 1 else []
    tags += sorted({v.text("pattern") for v in vertices if "pattern" in v.attrs})
    if not any(v.attends for v in vertices):
        tags += dict.fromkeys(RECURRENT[v.op] for v in vertices if v.op in RECURRENT)
    tags += ["experts"] if any(v.op == "moe" for v in vertices) else []
    return " · ".join([f"{stem} {part.name}", *tags])


def _list_contents(part: PicturePart) -> str:
    labels = [(c, label_part(c)) for c in part.body.children]
    return ", ".join(dict.fromkeys(text.title for c, text in labels if not (c.vertices and text.symbol)))


def _format_number(text: object) -> str:
    return f"{int(str(text)):,}" if str(text).isdigit() else str(text)
