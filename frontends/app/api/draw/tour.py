"""A tour through a model in a few steps, with its own sizes: for readers who see a transformer for the first time.

templates/tour.md.j2 has a template for each step: a title, paragraphs, formulas (indented) and sources (quoted).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

from jinja2 import Environment

from weft.backends.viz.model.network import Network, Vertex
from weft.backends.viz.panels.cache_panel import read_heads
from weft.backends.viz.panels.kinds import list_attentions
from weft.ir.readable import format_bytes, format_count
from weft.ir.storage import scratch_folder

from ....model import Model
from ..inspect.inspection import Inspection

EXAMPLE = "Unbelievable! The cat sat on the mat, then it sat on the sofa."
MOST = 12  # steps
UNITS = {"silu": "SwiGLU", "gelu": "GEGLU", "gelu_tanh": "GEGLU", "relu": "ReGLU"}
LINEAR_RECURRENCES = ("linear_attention", "gated_linear_attention", "gated_delta_rule")
Facts = dict[str, Any]  # of a step: variables of its text; "at", the key of a part of the picture; "widget"


def write_totals(facts: Inspection) -> str:
    """Return the size of a model in a line: parameters, layers, context, and the cache of a full context."""
    n, used = facts.parameters, facts.active_parameters
    parts = [f"{_format_billions(n)} parameters" + (f", {_format_billions(used)} per token" if used < n else "")]
    parts += [f"{facts.layers} layers"] if facts.layers else []
    parts += [f"context of {facts.context:,} tokens"] if facts.context else []
    parts += [f"KV cache {format_bytes(2 * facts.cache_at_context)} when full"] if facts.cache_at_context else []
    return " · ".join(parts)


def _format_billions(n: int) -> str:
    return f"{n / 1e9:.3g} B" if n >= 1e9 else f"{n / 1e6:.3g} M" if n >= 1e6 else f"{n:,}"


def build_tour(model: Model, network: Network, facts: Inspection) -> list[dict[str, Any]]:
    """Return at most 12 steps of a tour through `model` as page data; ideas that the model lacks have no step.

    Each has "title", "at" (the key of a part of the picture), "paragraphs", "formulas", "papers" and "widget", the name
    and settings of something to try.
    """
    subject, steps = _Subject(model, network, facts), []
    for name, find in STEPS.items():
        for variables in find(subject):
            steps.append({"at": "", "widget": {"kind": ""}, **_render(name, subject.common | variables)})
    return steps[:MOST]


def _render(name: str, variables: Facts) -> dict[str, Any]:
    """Return a step: its rendered text in parts, "at" and "widget"."""
    environment = Environment(autoescape=False, trim_blocks=False)
    environment.filters |= {"number": "{:,}".format, "bytes": format_bytes, "count": format_count}
    title, text = _read_texts()[name]
    blocks = environment.from_string(text).render(**variables).split("\n\n")
    blocks = [block.strip("\n") for block in blocks if block.strip()]
    lines = [line for block in blocks if block.startswith((" ", ">")) for line in block.splitlines()]
    return {
        "title": title,
        "paragraphs": [block.strip() for block in blocks if not block.startswith((" ", ">"))],
        "formulas": [line.strip() for line in lines if line.startswith(" ") and line.strip()],
        "papers": [paper for line in lines if line.startswith(">") and (paper := line[1:].strip())],
        **{key: variables[key] for key in ("at", "widget") if key in variables},
    }


@functools.cache
def _read_texts() -> dict[str, tuple[str, str]]:
    """Return a dict from the name of a step to its title and the Jinja template of its text."""
    text = (files(__package__) / "templates" / "tour.md.j2").read_text(encoding="utf-8")
    parts = re.split(r"^# ([\w-]+): (.+)$", text, flags=re.MULTILINE)[1:]
    return {name: (title, body) for name, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


class _Subject:
    """A model to explain, with its network and inspection; `common` are the variables of all steps."""

    def __init__(self, model: Model, network: Network, facts: Inspection) -> None:
        self.model, self.network, self.facts = model, network, facts
        self.attentions = list(list_attentions(network))
        sizes = facts.dimensions
        width = sizes.width[0] if sizes.width else 0
        self.common: Facts = {"vocab": facts.vocab, "width": width, "layers": facts.layers, "context": facts.context}
        self.common |= {"heads": self.attentions[0][1].heads if self.attentions else 0, "pieces": ()}

    def first(self, *names: str) -> Vertex | None:
        """Return the first operation called one of `names`."""
        return next((v for v in self.network.vertices if v.weft_op.op in names), None)


def _place(vertex: Vertex) -> str:
    """Return the key of the part of the picture that computes `vertex`: its module, or itself outside of one."""
    return vertex.scope if "." in vertex.scope.partition(".")[2] else vertex.name


def _find_tokens(m: _Subject) -> Iterator[Facts]:
    if m.facts.vocab is not None and "input_ids" in m.network.inputs:
        pieces = _tokenize_example(m.model)
        m.common["pieces"] = pieces
        yield {"at": "input_ids", "widget": {"kind": "tokens", "pieces": pieces}}


def _tokenize_example(model: Model) -> list[tuple[str, int]]:
    if model.tokenizer is None:
        return []
    from weft.backends.runtime.text.tokenizer import Tokenizer

    with scratch_folder() as folder:
        model.tokenizer(folder)
        tokenizer = Tokenizer(folder)
        return [(tokenizer.decode([i]) or tokenizer.get_token(i), i) for i in tokenizer.encode(EXAMPLE)]


def _find_embedding(m: _Subject) -> Iterator[Facts]:
    vertex = m.first("embedding", "embed_tokens")
    if vertex is not None and m.facts.vocab is not None and m.facts.dimensions.width:
        names = {w.name for w in vertex.weights}
        tied = any(w.name in names for v in m.network.vertices if v is not vertex for w in v.weights)
        rows = {"kind": "rows", "vocab": m.facts.vocab, "width": m.common["width"]}
        yield {"at": vertex.name, "tied": tied, "widget": rows}


def _find_stream(m: _Subject) -> Iterator[Facts]:
    norm = m.first("rms_norm", "layer_norm")
    if norm is not None and m.facts.layers:
        yield {"at": norm.scope if norm.scope.endswith(".0") else norm.name, "hidden": m.facts.dimensions.hidden}


def _find_norm(m: _Subject) -> Iterator[Facts]:
    norm = m.first("rms_norm", "layer_norm")
    if norm is not None and m.common["width"]:
        rms = norm.weft_op.op == "rms_norm"
        yield {"at": norm.name, "rms": rms, "widget": {"kind": "norm", "rms": rms}}


def _find_attention(m: _Subject) -> Iterator[Facts]:
    for vertex, kind in m.attentions[:1]:
        sizes = m.facts.dimensions
        width = read_heads(vertex, kind, m.network)[0] if vertex.cache else sizes.head_dim[0] if sizes.head_dim else 0
        shared = {"heads": kind.heads, "kv_heads": kind.kv_heads, "causal": kind.keys.causal}
        latent = sizes.latent[0] if sizes.latent else 0
        widget = {"kind": "" if latent else "heads", "width": width, **shared}
        yield {
            **shared,
            **{"at": _place(vertex), "head_dim": width, "latent": latent, "sinks": kind.sinks, "widget": widget},
        }


def _find_windows(m: _Subject) -> Iterator[Facts]:
    windowed = [(vertex, kind.keys.window) for vertex, kind in m.attentions if kind.keys.window is not None]
    for vertex, window in windowed[:1]:
        widget = {"kind": "receptive", "window": window, "layers": len(windowed)}
        counts = {"windowed": len(windowed), "attentions": len(m.attentions), "window": window}
        yield {"at": _place(vertex), "widget": widget, **counts}


def _find_rope(m: _Subject) -> Iterator[Facts]:
    rotations = ((v, w.rotary) for v in m.network.vertices for w in v.weights if w.rotary is not None)
    for vertex, rotary in list(rotations)[:1]:
        scaling = "" if rotary.scaling == "none" else rotary.describe()
        widget = {"kind": "angle", "theta": rotary.theta, "dim": rotary.dim}
        yield {
            **{"at": _place(vertex), "theta": rotary.theta, "rotary": rotary.dim, "scaling": scaling, "widget": widget}
        }


def _find_positions(m: _Subject) -> Iterator[Facts]:
    positions = m.facts.dimensions.positions
    if positions and "rope" not in positions[0].lower() and not any(_find_rope(m)):
        vertex = m.first("alibi", "relative_position_bias", "relative_attention")
        yield {"positions": positions[0], "at": _place(vertex) if vertex is not None else ""}


def _find_recurrence(m: _Subject) -> Iterator[Facts]:
    names = m.facts.dimensions.recurrences
    vertex = m.first(*names) if names else None
    if vertex is not None:
        state = (m.facts.state_bytes or {}).get("f16", 0)
        linear = vertex.weft_op.op in LINEAR_RECURRENCES
        yield {"at": _place(vertex), "state": state, "linear": linear, "widget": {"kind": "decay"}}


def _find_feed_forward(m: _Subject) -> Iterator[Facts]:
    vertex = m.first("glu", "gelu", "relu", "relu2", "swish")
    if vertex is not None and m.facts.dimensions.hidden:
        gated = vertex.weft_op.op == "glu"
        activation = vertex.weft_op.text("activation", "silu") if gated else vertex.weft_op.op
        layers = {v.scope for v in m.network.vertices if v.weft_op.op == vertex.weft_op.op}
        stored = sum(w.learned for v in m.network.vertices if v.scope in layers for w in v.weights)
        share = f"{stored / m.facts.parameters:.0%}" if m.facts.parameters and stored > m.facts.parameters / 20 else ""
        yield {
            **{"at": _place(vertex), "hidden": m.facts.dimensions.hidden[0], "gated": gated, "activation": activation},
            **{"unit": UNITS.get(activation, "Gated"), "share": share},
            "widget": {"kind": "activation", "name": activation},
        }


def _find_experts(m: _Subject) -> Iterator[Facts]:
    vertex = m.first("moe", "mixture")
    for mixture in m.facts.dimensions.experts[:1] if vertex is not None else ():
        active = mixture.active or mixture.count
        numbers = {"experts": mixture.count, "active": active}
        used = {"parameters": m.facts.parameters, "used": m.facts.active_parameters}
        widget = {"kind": "experts", "count": mixture.count, "active": active}
        yield {"at": _place(vertex) if vertex is not None else "", **numbers, **used, "widget": widget}


def _find_head(m: _Subject) -> Iterator[Facts]:
    if "logits" in m.network.outputs and m.facts.vocab is not None and m.facts.kind != "encoder":
        yield {"at": m.network.outputs["logits"][0]}


def _find_sampling(m: _Subject) -> Iterator[Facts]:
    if m.facts.kind != "encoder":
        yield from ({**variables, "widget": {"kind": "temperature"}} for variables in _find_head(m))


def _find_cache(m: _Subject) -> Iterator[Facts]:
    if m.facts.cache_per_token and m.facts.kind != "encoder" and m.attentions:
        length, each = m.facts.context or 4096, 2 * m.facts.cache_per_token
        full = 2 * (m.facts.cache_at_context or m.facts.cache_per_token * length)
        sizes = {"cached": m.facts.cache_per_token, "each": each, "full": full, "length": length}
        yield {**sizes, "at": _place(m.attentions[0][0]), "widget": {"kind": "cache", "each": each, "context": length}}


def _find_speed(m: _Subject) -> Iterator[Facts]:
    if m.facts.kind != "encoder" and m.facts.active_parameters:
        stored = round(m.facts.active_parameters * (_find_bits(m) or 16) / 8)
        yield {"stored": stored, "flops": m.facts.flops_per_token}


def _find_quantization(m: _Subject) -> Iterator[Facts]:
    if bits := _find_bits(m):
        yield {"bits": bits, "widget": {"kind": "bits", "bits": round(bits)}}


def _find_bits(m: _Subject) -> float | None:
    return next((w.bits for v in m.network.vertices for w in v.weights if w.bits is not None), None)


STEPS: dict[str, Callable[[_Subject], Iterator[Facts]]] = {
    "tokens": _find_tokens,
    "embedding": _find_embedding,
    "stream": _find_stream,
    "norm": _find_norm,
    "attention": _find_attention,
    "windows": _find_windows,
    "rope": _find_rope,
    "positions": _find_positions,
    "recurrence": _find_recurrence,
    "feed-forward": _find_feed_forward,
    "experts": _find_experts,
    "head": _find_head,
    "sampling": _find_sampling,
    "cache": _find_cache,
    "speed": _find_speed,
    "quantization": _find_quantization,
}
