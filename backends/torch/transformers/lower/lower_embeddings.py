"""Lower embeddings (callers may pass `inputs_embeds` instead), activations, distance biases and positions."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Node, Param

from ...ops.elementwise import format_number
from ...program.statements import TOP, Operand, Submodule, Var
from .model_emitter import HEAD, HFEmitter, hf_lowering

MODULES = {  # activation: source of its torch module
    "silu": "nn.SiLU()",
    "gelu": "nn.GELU()",
    "gelu_tanh": 'nn.GELU(approximate="tanh")',
    "relu": "nn.ReLU()",
    "sigmoid": "nn.Sigmoid()",
    "tanh": "nn.Tanh()",
    "elu": "nn.ELU()",
    "identity": "nn.Identity()",
}


@hf_lowering(ops.embedding)
def _lower_embedding(e: HFEmitter, node: Node) -> Operand | None:
    """Emit the first embedding of the token ids as the default of `inputs_embeds`; return None for other embeddings."""
    ids, table = node.required_operand("ids"), node.required_operand("table")
    if e.graph.inputs.get("input_ids") is not ids or e.embedding or not isinstance(table, Param):
        return None
    rows, width = e.shape_of(table)
    e.embeds.shape = node.output.shape
    scaling = _find_scaling(e, node)
    init = f"nn.Embedding({rows}, {width})"
    if scaling is not None:
        init = f"ScaledEmbedding({rows}, {width}, {format_number(e.attr(scaling, 'by'))})"
    leaf = e.make_submodule(init, weight=table)
    e.scaling = scaling if leaf else None
    e.embedding = table.name.removesuffix(".weight")
    e.emit_embedding("{2}({1})" if leaf else "F.embedding({1}, {2})", leaf or e[table])
    return e.emit("{0}", e.embeds, name="hidden_states", shape=node.output.shape)


def _find_scaling(e: HFEmitter, node: Node) -> Node | None:
    """Return the node that alone reads and scales the embeddings of a decoder: engines expect their module to."""
    if len(node.output.uses) != 1 or node.output.is_output or e.graph.meta.get("kind") != "decoder":
        return None
    ((reader, _),) = node.output.uses
    scales = reader.op is ops.affine and reader.attrs["plus"] == 0 and "." not in reader.scope
    return reader if scales else None


@hf_lowering(ops.linear)
def _lower_head(e: HFEmitter, node: Node) -> Operand | None:
    """Emit the head's linear map as the module lm_head of the model, which engines replace; None for other maps."""
    if node is not e.head:
        return None
    weight, bias = node.required_operand("weight"), node.operand("bias")
    assert isinstance(weight, Param)
    out, width = e.shape_of(weight)
    e.program.weights[f"{HEAD}.weight"] = weight
    if isinstance(bias, Param):
        e.program.weights[f"{HEAD}.bias"] = bias
    e.scope = TOP
    init = f"nn.Linear({width}, {out}{', bias=False' * (bias is None)})"
    leaf = Submodule(HEAD, init, ("weight",) if bias is None else ("weight", "bias"))
    return e.emit("{1}({0})", node.required_operand("x"), leaf, name="logits")


@hf_lowering(ops.glu)
def _lower_glu(e: HFEmitter, node: Node) -> Operand | None:
    """Emit act(gate) · up with act as a module, as engines expect; None if it has no module, or for limit or shift."""
    if node.attrs["limit"] is not None or node.attrs["shift"] or node.attrs["activation"] not in MODULES:
        return None
    act = _make_activation(e, node, MODULES[node.attrs["activation"]])
    return e.emit("{2}({0}) * {1}", node.required_operand("gate"), node.required_operand("up"), act)


@hf_lowering(ops.relu, ops.gelu, ops.tanh, ops.swish)
def _lower_activation(e: HFEmitter, node: Node) -> Operand | None:
    """Emit an activation between two linear maps as a module; None elsewhere, or if torch has no module for it."""
    x = node.required_operand("x")
    name = {"swish": "silu"}.get(node.op.name, node.op.name)
    if node.op is ops.gelu and node.attrs["approximate"] != "none":
        name = {"tanh": "gelu_tanh"}.get(node.attrs["approximate"], "")
    plain = node.op is not ops.swish or node.attrs["beta"] == 1
    between = x.producer is not None and x.producer.op is ops.linear and x.producer.scope == node.scope
    feeds = [reader.op for reader, _ in node.output.uses] == [ops.linear]
    if not (plain and between and feeds and node.scope and name in MODULES):
        return None
    return e.emit("{1}({0})", x, _make_activation(e, node, MODULES[name]), replaces=0)


def _make_activation(e: HFEmitter, node: Node, init: str) -> Submodule:
    """Return the module with source `init` in `node`'s scope: act, or act_fn if a parameter is act or inside it."""
    path = f"{node.scope}.act" if node.scope else "act"
    clashes = any(p == path or p.startswith(f"{path}.") for p in e.graph.params)
    return Submodule(f"{path}_fn" if clashes else path, init)


@hf_lowering(ops.alibi)
def _lower_alibi(e: HFEmitter, node: Node) -> Operand:
    slopes = e[node.required_operand("slopes")]
    distance = emit_distances(e)
    text = "alibi({0}, {1})" if not node.attrs["symmetric"] else "alibi({0}, -{1}.abs())"
    if isinstance(slopes, Var) and e.is_hoisted(slopes):
        return e.hoist((text, slopes, distance), text, slopes, distance, name="bias")
    return e.emit(text, slopes, distance, name="bias")


@hf_lowering(ops.relative_position_bias)
def _lower_relative_position_bias(e: HFEmitter, node: Node) -> Operand | None:
    if node.required_operand("queries").shape[1] not in {v.shape[1] for v in node.graph.inputs.values() if v.shape[1:]}:
        return None  # distances between other things than tokens
    part = "relative_bias" if node.attrs["bidirectional"] else "causal_relative_bias"
    text = f"{part}({{0}}, {{1}}, {e.attr(node, 'max_distance')})"
    return e.emit(text, node.required_operand("table"), emit_distances(e), name="bias")


def emit_distances(e: HFEmitter) -> Var:
    """Return the distances key − query [1, seq, keys] of all keys from the new tokens, emitted once for all layers."""
    operands = (e.embeds, e.self_past) if e.is_decoder else (e.embeds,)
    return e.hoist("distance", f"key_distances({'{0}, {1}' if e.is_decoder else '{0}'})", *operands, name="distance")


@hf_lowering(ops.iota)
def _lower_iota(e: HFEmitter, node: Node) -> Operand | None:
    """Return an encoder's token positions [seq], which callers may pass as `position_ids`; None for other iotas."""
    return e.emit("{0}[0]", e.positions, name="position_index") if is_position_iota(e, node) else None


@hf_lowering(ops.unsqueeze)
def _lower_unsqueeze(e: HFEmitter, node: Node) -> Operand | None:
    """Return an encoder's token positions [1, seq] without emitting an unsqueeze; None for other operands."""
    iota = node.required_operand("x").producer
    return e.positions if iota is not None and is_position_iota(e, iota) and node.attrs["axes"] == (0,) else None


def is_position_iota(e: HFEmitter, node: Node) -> bool:
    """Return whether `node` is the iota that computes the positions of all tokens of an encoder."""
    return (
        not e.is_decoder
        and node.op is ops.iota
        and node.required_operand("x") is e.graph.inputs.get("input_ids")
        and node.attrs["axis"] == 1
    )


@hf_lowering(ops.affine)
def _lower_affine(e: HFEmitter, node: Node) -> Operand | None:
    """Emit the division of logits by the soft cap; for a `ScaledEmbedding`'s scale return its operand, else None."""
    if node is e.scaling:
        return e[node.required_operand("x")]
    if node not in e.softcap_divisions:
        return None
    return e.emit("{0} / config.final_logit_softcapping", node.required_operand("x"), replaces=0)
