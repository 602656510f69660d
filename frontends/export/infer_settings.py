"""Inference of a decoder's settings from its graph, in the vocabulary of family tables.

Only facts that a config states are inferred; the graph of the resulting config is compared with it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from weft.ir import Graph, Node, Op, Param, Value, ops
from weft.ir.errors import WeftError
from weft.ir.ops.activation import ACTIVATIONS
from weft.passes.analysis.projections import Projections, find_projections
from weft.passes.analysis.rotary import get_frequencies

from ..dsl import GatedMLP, MoE, RoPE, Router
from ..model import Model
from ..models.families import Settings

_NORMS = (ops.rms_norm, ops.layer_norm)


def propose_settings(
    model: Model, graph: Graph, source_name: str | None, names: Sequence[str]
) -> Iterator[tuple[str, Settings]]:
    """Yield (family, settings) for the canonical `graph`: if `names` has `source_name` and `model` has settings, first
    (`source_name`, these settings); then each of `names` with the settings inferred from `graph`.

    Raises:
        WeftError: if no settings can be inferred, after that first pair.
    """
    if source_name is not None and source_name in names and model.settings is not None:
        yield source_name, model.settings.resolved
    settings = infer_settings(graph)
    yield from ((name, settings) for name in names)


def infer_settings(graph: Graph) -> Settings:
    """Return the settings of the decoder that the canonical `graph` computes.

    Raises:
        WeftError: if it has no logits, no softmax attention, or an attention or router that no config describes.
    """
    end_settings = _infer_ends(graph)
    layers = _find_attentions(graph)
    first = layers[0]
    norm = _find_norm(first) or next((n for n in graph.nodes if n.op in _NORMS), None)
    options = {
        "kv_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "context": graph.meta.get("context"),
        "norm": "layer" if norm is not None and norm.op is ops.layer_norm else "rms",
        "norm_bias": norm is not None and norm.op is ops.layer_norm and norm.operand("bias") is not None,
        "eps": norm.attrs["eps"] if norm is not None else 1e-6,
        "arrangement": _infer_arrangement(first),
        "residual_scale": _read_factor(first.o.output),
        "qkv_bias": any(branch.bias is not None for layer in layers for branch in layer.branches),
        "out_bias": any(_has_bias(layer.o) for layer in layers),
        "qk_norm": _infer_qk_norm(first),
        "clip": next((n.attrs["high"] for n in first.q.between if n.op is ops.clip), None),
        "rope": _collapse([None if layer.q.rope is None else _infer_rope(layer.q.rope) for layer in layers]),
        "window": _collapse([layer.node.attrs["window"] for layer in layers]),
        "scale": _collapse([layer.node.attrs["scale"] for layer in layers]),
        "softcap": first.node.attrs["softcap"],
    }
    shape = {"layers": len(layers), "dim": first.o.output.width, "heads": first.heads, "moe": _find_mixtures(graph)}
    return Settings(**shape, **options, **_infer_ffn(graph), **end_settings)


def _find_attentions(graph: Graph) -> list[Projections]:
    layers = []
    for node in graph.nodes:
        if node.op is ops.attention:
            parts = find_projections(node)
            if isinstance(parts, str):
                raise WeftError(f"no config describes attention %{node.output.name}: {parts}")
            layers.append(parts)
    if not layers:
        raise WeftError("the graph has no softmax attention, which a config needs")
    return layers


def _infer_rope(node: Node) -> RoPE | None:
    """Return the settings of a rope node; None if its frequencies follow no known formula."""
    recipe = get_frequencies(node)
    if recipe is None:
        return None
    settings = recipe.settings | {"theta": recipe.theta}
    if recipe.scaling == "ntk":  # equals a larger base, at all lengths
        settings |= {"scaling": "none", "factor": 1.0, "theta": recipe.base(recipe.dim, recipe.theta)}
    return RoPE(dim=recipe.dim, interleaved=node.attrs["interleaved"], amplitude=node.attrs["amplitude"], **settings)


def _collapse(values: Sequence[Any]) -> Any:
    return values[0] if all(v == values[0] for v in values) else tuple(values)


def _has_bias(linear: Node | None) -> bool:
    return linear is not None and linear.operand("bias") is not None


def _find_reader(value: Value, *reader_ops: Op) -> Node | None:
    return next((n for n in value.users if n.op in reader_ops), None)


def _find_norm(layer: Projections) -> Node | None:
    x = layer.q.linear.inputs[0]
    if x is not None and x.producer is not None and x.producer.op in _NORMS:
        return x.producer
    return _find_reader(layer.o.output, *_NORMS)


def _read_factor(value: Value) -> float:
    node = _find_reader(value, ops.affine)
    return 1.0 if node is None else float(node.attrs["by"])


def _infer_qk_norm(layer: Projections) -> str:
    norm = layer.q.norm
    if norm is None:
        return "none"
    if norm.output.type.rank == 3:
        return "full"
    return "each" if any(n.op is ops.mul for n in layer.q.between) else "head"


def _infer_arrangement(layer: Projections) -> str:
    """Return the arrangement of norms and residuals of `layer` as the DSL's `Block` names it ("pre", "post", …)."""
    x = layer.q.linear.inputs[0]
    assert x is not None
    residual = _find_reader(layer.o.output, ops.add)
    if residual is not None and x in residual.inputs:  # the residual stream, perhaps after a norm
        return "post" if len(residual.output.users) == 1 else "pre_ffn"
    has_norm_before = x.producer is not None and x.producer.op in _NORMS
    has_norm_after = _find_reader(layer.o.output, *_NORMS) is not None
    if not has_norm_before:
        return "post_sublayer" if has_norm_after else "post"
    if has_norm_after:
        return "sandwich"
    assert x.producer is not None
    stream = x.producer.inputs[0]
    inner = {branch.linear for branch in layer.branches}
    if any(n not in inner for n in x.users):
        return "parallel"
    norms = [] if stream is None else [n for n in stream.users if n.op in _NORMS and n is not x.producer]
    return "parallel_norms" if norms else "pre"


def _infer_ffn(graph: Graph) -> dict[str, Any]:
    """Return the settings of the first dense feed-forward, which all layers are assumed to share; {} without one."""
    for node in graph.nodes:
        down = _find_reader(node.output, ops.linear) if node.outputs else None
        name = _name_activation(node)
        if name is None or down is None:
            continue
        x = node.inputs[0]
        above = None if x is None else x.producer
        if above is not None and above.op is ops.linear:
            shape = {"ffn": node.output.width, "ffn_bias": _has_bias(above) or _has_bias(down)}
            return {**shape, "activation": name, "gated": node.op is ops.glu}
    return {}


def _find_mixtures(graph: Graph) -> Any:
    mixtures: list[MoE | None] = []
    for node in graph.nodes:
        if node.op is ops.attention:
            mixtures.append(None)
        elif node.op is ops.moe and mixtures:
            mixtures[-1] = _infer_mixture(node)
    return _collapse(mixtures)


def _infer_mixture(node: Node) -> MoE:
    """Return the settings of the mixture of experts `node`, whose router must be the op `route`."""
    combine, up = node.operand("combine"), node.operand("up")
    route = None if combine is None else combine.producer
    if route is None or route.op is not ops.route or up is None:
        raise WeftError(f"no config describes the router of the experts %{node.output.name}")
    experts, hidden = (int(size) for size in up.shape[:2])
    router = Router(**{name: route.attrs[name] for name in ("renormalize", "scoring", "scale")})
    activation = node.attrs["activation"]
    sum_ = _find_reader(node.output, ops.add)
    shared = None if sum_ is None else next((v for v in sum_.inputs if v is not None and v is not node.output), None)
    inner = _find_shared_expert(shared)
    mlp = None if inner is None else GatedMLP(inner.output.width, activation)
    gated = node.operand("gate") is not None
    return MoE(experts, hidden, route.attrs["k"], activation, router, gated, shared=mlp, shared_gate=mlp is not None)


def _find_shared_expert(value: Value | None) -> Node | None:
    """Return the `glu` node of the shared expert if `value` is gate · linear(glu(…)), else None."""
    product = None if value is None else value.producer
    if product is None or product.op is not ops.mul:
        return None
    down = [v.producer for v in product.inputs if v is not None and v.producer is not None]
    hidden_values = [n.inputs[0] for n in down if n.op is ops.linear]
    return next((v.producer for v in hidden_values if v is not None and v.producer and v.producer.op is ops.glu), None)


def _name_activation(node: Node) -> str | None:
    if node.op is ops.glu:
        return str(node.attrs["activation"])
    for name, (fn, attrs) in ACTIVATIONS.items():
        defaults = {a.name: a.default for a in fn.attrs.values()}
        if node.op is fn and node.attrs == {**defaults, **attrs}:
            return name
    return None


def _infer_ends(graph: Graph) -> dict[str, Any]:
    """Return the settings of the embedding before the first layer and of the head after the last."""
    if "logits" not in graph.outputs:
        raise WeftError("the graph has no output logits, which a decoder needs")
    value, settings = graph.outputs["logits"], dict[str, Any](vocab=graph.outputs["logits"].width)
    if "task" in graph.meta:
        value, settings = graph.outputs["last_hidden_state"], {"vocab": graph.meta["vocab"]}
    chain = list(_trace_back(value, ops.affine, ops.tanh, ops.linear))
    if [n.op for n in chain[:3]] == [ops.affine, ops.tanh, ops.affine]:
        settings["logit_softcap"] = float(chain[0].attrs["by"])
        chain = chain[3:]
    if chain and chain[0].op is ops.affine:
        settings["logit_scale"] = float(chain[0].attrs["by"])
        chain = chain[1:]
    if chain and chain[0].op is ops.linear:
        head = chain[0].operand("weight")
        settings["head_bias"] = _has_bias(chain[0])
        settings["tie"] = head is not None and _find_reader(head, ops.embedding) is not None
    tables = [n for n in graph.nodes if n.op is ops.embedding]
    if tables:
        settings["embed_scale"] = _read_factor(tables[0].output)
    rows = [n.operand("table") for n in tables if n.operand("ids") is graph.inputs.get("position_ids")]
    if rows and isinstance(rows[0], Param):
        settings["learned_positions"] = int(rows[0].shape[0])
    return settings


def _trace_back(value: Value, *through: Op) -> Iterable[Node]:
    while value.producer is not None and value.producer.op in through:
        yield value.producer
        x = value.producer.inputs[0]
        assert x is not None
        value = x
