"""Infer a decoder's settings from its graph, in the vocabulary of family tables.

This reads what a config would have to say, and looks at no more than that: whether the graph is that of the config is
compared afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from weft.ir import Graph, Node, Op, Param, Value, ops
from weft.ir.errors import WeftError
from weft.ir.ops.activation import ACTIVATIONS
from weft.passes.analysis.projections import Projections, projections
from weft.passes.analysis.rotary import recipe_of

from ..dsl import GatedMLP, MoE, RoPE
from ..model import Model
from ..models.families import Settings

_NORMS = (ops.rms_norm, ops.layer_norm)


def proposals(model: Model, graph: Graph, own: str | None, names: Sequence[str]) -> Iterator[tuple[str, Settings]]:
    """Yield what `names` may say of the canonical `graph`: its `own` family the settings that `model` was read with,
    then each those inferred from the graph.

    Raises:
        WeftError: if none can be inferred.
    """
    if own is not None and own in names and model.settings is not None:
        yield own, model.settings.explicit
    settings = read_settings(graph)
    yield from ((name, settings) for name in names)


def read_settings(graph: Graph) -> Settings:
    """The settings of the decoder that the canonical `graph` is.

    Raises:
        WeftError: if it is none of softmax attentions and feed-forwards.
    """
    ends = _ends(graph)
    layers = _attentions(graph)
    first = layers[0]
    norm = _norm_of(first) or next((n for n in graph.nodes if n.op in _NORMS), None)
    options = {
        "kv_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "context": graph.meta.get("context"),
        "norm": "layer" if norm is not None and norm.op is ops.layer_norm else "rms",
        "norm_bias": norm is not None and norm.op is ops.layer_norm and norm.operand("bias") is not None,
        "eps": norm.attrs["eps"] if norm is not None else 1e-6,
        "arrangement": _arrangement(first),
        "residual_scale": _factor(first.o.output),
        "qkv_bias": any(branch.bias is not None for layer in layers for branch in layer.branches),
        "out_bias": any(_bias(layer.o) for layer in layers),
        "qk_norm": _qk_norm(first),
        "clip": next((n.attrs["high"] for n in first.q.between if n.op is ops.clip), None),
        "rope": _alike([None if layer.q.rope is None else _rope(layer.q.rope) for layer in layers]),
        "window": _alike([layer.node.attrs["window"] for layer in layers]),
        "scale": _alike([layer.node.attrs["scale"] for layer in layers]),
        "softcap": first.node.attrs["softcap"],
    }
    shape = {"layers": len(layers), "dim": first.o.output.width, "heads": first.heads, "moe": _mixtures(graph)}
    return Settings(**shape, **options, **_dense(graph), **ends)


def _attentions(graph: Graph) -> list[Projections]:
    found = []
    for node in graph.nodes:
        if node.op is ops.attention:
            read = projections(node)
            if isinstance(read, str):
                raise WeftError(f"the attention %{node.output.name} is none that a config describes: {read}")
            found.append(read)
    if not found:
        raise WeftError("the graph has no softmax attention")
    return found


def _rope(node: Node) -> RoPE | None:
    """The rotation as a config says it; None where its frequencies follow no formula."""
    recipe = recipe_of(node)
    if recipe is None:
        return None
    settings = recipe.settings | {"theta": recipe.theta}
    if recipe.scaling == "ntk":  # a larger base, once and for all
        settings |= {"scaling": "none", "factor": 1.0, "theta": recipe.base(recipe.dim, recipe.theta)}
    return RoPE(dim=recipe.dim, interleaved=node.attrs["interleaved"], amplitude=node.attrs["amplitude"], **settings)


def _alike(values: Sequence[Any]) -> Any:
    """One value if all are equal, else a tuple of them."""
    return values[0] if all(v == values[0] for v in values) else tuple(values)


def _bias(linear: Node | None) -> bool:
    return linear is not None and linear.operand("bias") is not None


def _reader(value: Value, *wanted: Op) -> Node | None:
    """The node of one of the ops `wanted` that reads `value`."""
    return next((n for n in value.users if n.op in wanted), None)


def _norm_of(layer: Projections) -> Node | None:
    """The norm before the attention, or the one behind it."""
    before = layer.q.linear.inputs[0]
    if before is not None and before.producer is not None and before.producer.op in _NORMS:
        return before.producer
    return _reader(layer.o.output, *_NORMS)


def _factor(value: Value) -> float:
    """Return the factor that `value` is first multiplied by."""
    node = _reader(value, ops.affine)
    return 1.0 if node is None else float(node.attrs["by"])


def _qk_norm(layer: Projections) -> str:
    norm = layer.q.norm
    if norm is None:
        return "none"
    if norm.output.type.rank == 3:
        return "full"
    return "each" if any(n.op is ops.mul for n in layer.q.between) else "head"


def _arrangement(layer: Projections) -> str:
    """Name the arrangement of the first block, as `Block` does."""
    x = layer.q.linear.inputs[0]
    assert x is not None
    added = _reader(layer.o.output, ops.add)
    if added is not None and x in added.inputs:  # the stream itself, which may be a norm's output
        return "post" if len(added.output.users) == 1 else "pre_ffn"
    before = x.producer is not None and x.producer.op in _NORMS
    after = _reader(layer.o.output, *_NORMS) is not None
    if not before:
        return "post_sublayer" if after else "post"
    if after:
        return "sandwich"
    assert x.producer is not None
    stream = x.producer.inputs[0]
    inner = {branch.linear for branch in layer.branches}
    if any(n not in inner for n in x.users):
        return "parallel"
    norms = [] if stream is None else [n for n in stream.users if n.op in _NORMS and n is not x.producer]
    return "parallel_norms" if norms else "pre"


def _dense(graph: Graph) -> dict[str, Any]:
    """Settings of the feed-forwards, as the first one is."""
    for node in graph.nodes:
        down = _reader(node.output, ops.linear) if node.outputs else None
        name = _activation(node)
        if name is None or down is None:
            continue
        x = node.inputs[0]
        above = None if x is None else x.producer
        if above is not None and above.op is ops.linear:
            shape = {"ffn": node.output.width, "ffn_bias": _bias(above) or _bias(down)}
            return {**shape, "activation": name, "gated": node.op is ops.glu}
    return {}


def _mixtures(graph: Graph) -> Any:
    """The experts of every layer, None where it has none."""
    found: list[MoE | None] = []
    for node in graph.nodes:
        if node.op is ops.attention:
            found.append(None)
        elif node.op is ops.moe and found:
            found[-1] = _mixture(node)
    return _alike(found)


def _mixture(node: Node) -> MoE:
    """The experts of `node`, whose router must be the op `route`."""
    combine, up = node.operand("combine"), node.operand("up")
    route = None if combine is None else combine.producer
    if route is None or route.op is not ops.route or up is None:
        raise WeftError(f"the experts %{node.output.name} have a router that no config describes")
    experts, hidden = (int(size) for size in up.shape[:2])
    said: dict[str, Any] = {name: route.attrs[name] for name in ("k", "renormalize", "scoring", "scale")}
    activation = node.attrs["activation"]
    sum_ = _reader(node.output, ops.add)
    shared = None if sum_ is None else next((v for v in sum_.inputs if v is not None and v is not node.output), None)
    inner = _shared(shared)
    options: dict[str, Any] = (
        {} if inner is None else {"shared": GatedMLP(inner.output.width, activation), "shared_gate": True}
    )
    return MoE(experts, hidden, activation=activation, gated=node.operand("gate") is not None, **said, **options)


def _shared(value: Value | None) -> Node | None:
    """The glu of the expert that all tokens pass, where `value` is what it makes times a gate."""
    product = None if value is None else value.producer
    if product is None or product.op is not ops.mul:
        return None
    down = [v.producer for v in product.inputs if v is not None and v.producer is not None]
    found = [n.inputs[0] for n in down if n.op is ops.linear]
    return next((v.producer for v in found if v is not None and v.producer and v.producer.op is ops.glu), None)


def _activation(node: Node) -> str | None:
    """The name of the activation that `node` computes, or gates with."""
    if node.op is ops.glu:
        return str(node.attrs["activation"])
    for name, (fn, attrs) in ACTIVATIONS.items():
        defaults = {a.name: a.default for a in fn.attrs.values()}
        if node.op is fn and node.attrs == {**defaults, **attrs}:
            return name
    return None


def _ends(graph: Graph) -> dict[str, Any]:
    """Settings of what stands before the first layer and behind the last."""
    if "logits" not in graph.outputs:
        raise WeftError("the graph has no logits, so it is not a decoder")
    value, said = graph.outputs["logits"], dict[str, Any](vocab=graph.outputs["logits"].width)
    if "task" in graph.meta:
        value, said = graph.outputs["last_hidden_state"], {"vocab": graph.meta["vocab"]}
    chain = list(_back(value, ops.affine, ops.tanh, ops.linear))
    if [n.op for n in chain[:3]] == [ops.affine, ops.tanh, ops.affine]:
        said["logit_softcap"] = float(chain[0].attrs["by"])
        chain = chain[3:]
    if chain and chain[0].op is ops.affine:
        said["logit_scale"] = float(chain[0].attrs["by"])
        chain = chain[1:]
    if chain and chain[0].op is ops.linear:
        head = chain[0].operand("weight")
        said["head_bias"] = _bias(chain[0])
        said["tie"] = head is not None and _reader(head, ops.embedding) is not None
    tables = [n for n in graph.nodes if n.op is ops.embedding]
    if tables:
        said["embed_scale"] = _factor(tables[0].output)
    rows = [n.operand("table") for n in tables if n.operand("ids") is graph.inputs.get("position_ids")]
    if rows and isinstance(rows[0], Param):
        said["learned_positions"] = int(rows[0].shape[0])
    return said


def _back(value: Value, *through: Op) -> Iterable[Node]:
    """The nodes of the ops `through` that lead to `value`, last first."""
    while value.producer is not None and value.producer.op in through:
        yield value.producer
        x = value.producer.inputs[0]
        assert x is not None
        value = x
