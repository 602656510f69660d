"""A hundred faults of exports: what is changed in which side, and the operation and kind that bisection should name."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
import transformers

from weft.ir import ops
from weft.ir.graph import Graph
from weft.ir.recipes import Literal
from weft.passes import run_passes

Array = np.ndarray[Any, Any]
Change = Callable[[Array], Array]

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = {**SIZES, "num_key_value_heads": 2}
BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "mamba": ("MambaForCausalLM", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "bert": ("BertModel", SIZES),
    "bart": (
        "BartForConditionalGeneration",
        {
            **BART,
            "vocab_size": 97,
            "d_model": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
        },
    ),
}


def write_model(name: str, folder: Path) -> Any:
    """Write a model with random parameters of every kind; return it."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind).config_class(**settings, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config.decoder_start_token_id = 1
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (1.0 if p.ndim == 1 and key.endswith("weight") else 0.0))
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True)
class Fault:
    """A fault of a model: `inject` changes a copy of one side ("graph", "onnx", "module"); `against` is the other.

    `names`: the values of the graph or modules, one of which bisection should name; `kinds`: the right kinds.
    """

    model: str
    what: str
    side: str
    against: str
    inject: Callable[[Any], None]
    names: tuple[str, ...]
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.model} {self.what} in {self.side} against {self.against}"


# -- changes of a graph


def set_attrs(value: str, **attrs: Any) -> Callable[[Graph], None]:
    def inject(graph: Graph) -> None:
        find_node(graph, value).attrs.update(attrs)

    return inject


def find_node(graph: Graph, value: str) -> Any:
    return next(n for n in graph.nodes if value in [v.name for v in n.outputs])


def set_param(name: str, change: Change) -> Callable[[Graph], None]:
    """Change a parameter; `change` may also return another parameter of the graph, by its name."""

    def inject(graph: Graph) -> None:
        param = graph.params[name]
        new = np.asarray(change(np.asarray(param.recipe.evaluate(graph.reader), np.float32)), np.float32)
        param.recipe = Literal(tuple(new.reshape(-1).tolist()), new.shape)

    return inject


def exchange_params(*names: str) -> Callable[[Graph], None]:
    def inject(graph: Graph) -> None:
        a, b = (graph.params[name] for name in names)
        a.recipe, b.recipe = b.recipe, a.recipe

    return inject


def copy_param(name: str, other: str) -> Callable[[Graph], None]:
    def inject(graph: Graph) -> None:
        graph.params[name].recipe = graph.params[other].recipe

    return inject


def leave_out(value: str, operand: int = 0) -> Callable[[Graph], None]:
    """Let the readers of `value` read an operand of its node instead."""

    def inject(graph: Graph) -> None:
        node = find_node(graph, value)
        node.outputs[0].replace_uses(node.inputs[operand])

    return inject


def set_operand(value: str, operand: int, other: str) -> Callable[[Graph], None]:
    def inject(graph: Graph) -> None:
        known = {v.name: v for n in graph.nodes for v in n.outputs} | dict(graph.params) | dict(graph.inputs)
        find_node(graph, value).set_input(operand, known[other])

    return inject


def shift_positions(value: str) -> Callable[[Graph], None]:
    """Let the node of `value` read the next position."""

    def inject(graph: Graph) -> None:
        node, at = find_node(graph, value), graph.inputs["position_ids"]
        with graph.inserting(before=node):
            node.set_input(node.inputs.index(at), ops.add(at, 1, name="next"))

    return inject


# -- changes of an ONNX file and of a module


def edit_onnx(folder: Path, out: Path, edit: Callable[[onnx.ModelProto], None], file: str = "model.onnx") -> Path:
    """Write a copy of the compiled folder, with `file` changed by `edit`."""
    shutil.copytree(folder, out)
    model = onnx.load(out / file)
    edit(model)
    onnx.save(model, out / file)
    return out


def set_attribute(value: str, name: str, new: Any) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if value in n.output)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute(name, new)])

    return edit


def set_initializer(name: str, change: Change) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.name == name)
        new = np.ascontiguousarray(change(onnx.numpy_helper.to_array(tensor)), np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(new, name))

    return edit


def set_node_input(value: str, index: int, other: str) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        next(n for n in model.graph.node if value in n.output).input[index] = other

    return edit


def replace_op(value: str, op: str) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        next(n for n in model.graph.node if value in n.output).op_type = op

    return edit


def set_parameter(name: str, change: Change) -> Callable[[torch.nn.Module], None]:
    def inject(module: torch.nn.Module) -> None:
        parameter = module.get_parameter(name)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(change(parameter.numpy().copy()), np.float32)))

    return inject


def set_field(path: str, field: str, value: Any) -> Callable[[torch.nn.Module], None]:
    return lambda module: setattr(module.get_submodule(path), field, value)


def set_activation(path: str, field: str, name: str) -> Callable[[torch.nn.Module], None]:
    return lambda module: setattr(module.get_submodule(path), field, transformers.activations.ACT2FN[name])


# -- changes of a weight


def bf16(w: Array) -> Array:
    return w.astype(ml_dtypes.bfloat16).astype(np.float32)


def int8(w: Array) -> Array:
    scale = np.abs(w).max(-1, keepdims=True) / 127
    return np.asarray(np.round(w / scale) * scale)


def zero_row(w: Array) -> Array:
    w = w.copy()
    w[3] = 0
    return w


def spoil_element(w: Array) -> Array:
    w = w.copy()
    w[2, 5] += 0.5
    return w


def double_column(w: Array) -> Array:
    w = w.copy()
    w[:, 5] *= 2
    return w


def scale(factor: float) -> Change:
    return lambda w: w * factor


def permute_heads(heads: int, order: Sequence[int], axis: int = 0) -> Change:
    def change(w: Array) -> Array:
        w = np.moveaxis(w, axis, 0)
        return np.moveaxis(w.reshape(heads, -1, *w.shape[1:])[list(order)].reshape(w.shape), 0, axis)

    return change


def interleave(heads: int) -> Change:
    """Move the two halves of the rows of each head between each other, as llama.cpp stores them."""
    return lambda w: w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def transpose(w: Array) -> Array:
    return w.T


def drop(w: Array) -> Array:
    return np.zeros_like(w)


def rope_base(theta: float) -> Change:
    return lambda f: theta ** -(np.arange(f.size) / f.size)


ROUNDING, OTHER, MISSING = ("rounding",), ("other weight",), ("missing operation", "missing operand")


def list_faults() -> Iterator[Fault]:
    """Yield all faults."""

    def graph(
        model: str, what: str, inject: Callable[[Graph], None], names: str, kinds: Sequence[str], against: str = "onnx"
    ) -> Fault:
        return Fault(model, what, "graph", against, inject, tuple(names.split()), tuple(kinds))

    def onnx_file(
        model: str, what: str, inject: Any, names: str, kinds: Sequence[str], against: str = "graph"
    ) -> Fault:
        return Fault(model, what, "onnx", against, inject, tuple(names.split()), tuple(kinds))

    def module(model: str, what: str, inject: Any, names: str, kinds: Sequence[str], against: str = "graph") -> Fault:
        return Fault(model, what, "module", against, inject, tuple(names.split()), tuple(kinds))

    l0, l1 = "layers.0", "layers.1"
    # Llama: grouped heads, RoPE, RMS norms, gated feed-forward
    yield graph("llama", "eps of a norm", set_attrs(f"{l1}.attn_norm", eps=1e-2), f"{l1}.attn_norm", ["eps", "epsilon"])
    yield graph(
        "llama", "eps of the last norm", set_attrs("final_norm", eps=1e-3), "final_norm", ["eps", "epsilon"], "module"
    )
    yield graph(
        "llama",
        "attention without √",
        set_attrs(f"{l0}.attn.attention", scale=1 / 8),
        f"{l0}.attn.attention",
        ["scale"],
    )
    yield graph(
        "llama", "scale 1", set_attrs(f"{l1}.attn.attention", scale=1.0), f"{l1}.attn.attention", ["scale"], "module"
    )
    yield graph(
        "llama", "not causal", set_attrs(f"{l0}.attn.attention", causal=False), f"{l0}.attn.attention", ["causal"]
    )
    yield graph(
        "llama", "window", set_attrs(f"{l1}.attn.attention", window=5), f"{l1}.attn.attention", ["window"], "module"
    )
    yield graph(
        "llama",
        "rope base",
        set_param("rope.frequencies", rope_base(5e5)),
        f"{l0}.attn.q_rope {l0}.attn.k_rope",
        ["theta"],
    )
    yield graph(
        "llama",
        "rope scaling",
        set_param("rope.frequencies", scale(1 / 4)),
        f"{l0}.attn.q_rope {l0}.attn.k_rope",
        ["rope scaling"],
        "module",
    )
    yield graph(
        "llama",
        "interleaved rope",
        set_attrs(f"{l0}.attn.q_rope", interleaved=True),
        f"{l0}.attn.q_rope",
        ["interleaved"],
    )
    yield graph(
        "llama",
        "position offset of q",
        shift_positions(f"{l0}.attn.q_rope"),
        f"{l0}.attn.q_rope {l0}.attn.k_rope",
        ["offset"],
    )
    yield graph(
        "llama", "activation", set_attrs(f"{l1}.ffn.glu", activation="gelu"), f"{l1}.ffn.glu", ["activation"], "module"
    )
    yield graph(
        "llama",
        "heads of q",
        set_param(f"{l0}.attn.q.weight", permute_heads(4, [1, 0, 3, 2])),
        f"{l0}.attn.q",
        ["permuted heads"],
    )
    yield graph(
        "llama",
        "layout of k",
        set_param(f"{l1}.attn.k.weight", interleave(2)),
        f"{l1}.attn.k",
        ["interleaved"],
        "module",
    )
    yield graph(
        "llama",
        "heads of k",
        set_param(f"{l1}.attn.k.weight", permute_heads(2, [1, 0])),
        f"{l1}.attn.k",
        ["permuted heads"],
    )
    yield graph(
        "llama", "o transposed", set_param(f"{l0}.attn.o.weight", transpose), f"{l0}.attn.o", ["transposed"], "module"
    )
    yield graph("llama", "q transposed", set_param(f"{l1}.attn.q.weight", transpose), f"{l1}.attn.q", ["transposed"])
    yield graph(
        "llama", "row of down", set_param(f"{l0}.ffn.down.weight", zero_row), f"{l0}.ffn.down", ["features"], "module"
    )
    yield graph("llama", "up scaled", set_param(f"{l0}.ffn.up.weight", scale(1.01)), f"{l0}.ffn.up", ["factor"])
    yield graph("llama", "gate in bf16", set_param(f"{l1}.ffn.gate.weight", bf16), f"{l1}.ffn.gate", ROUNDING, "module")
    yield graph("llama", "v in int8", set_param(f"{l0}.attn.v.weight", int8), f"{l0}.attn.v", ROUNDING)
    yield graph(
        "llama",
        "k and v exchanged",
        exchange_params(f"{l0}.attn.k.weight", f"{l0}.attn.v.weight"),
        f"{l0}.attn.k {l0}.attn.v",
        OTHER,
    )
    yield graph(
        "llama",
        "gate and up exchanged",
        exchange_params(f"{l1}.ffn.gate.weight", f"{l1}.ffn.up.weight"),
        f"{l1}.ffn.gate {l1}.ffn.up {l1}.ffn.glu",
        [*OTHER, "exchanged operands"],
        "module",
    )
    yield graph(
        "llama",
        "weight of another layer",
        copy_param(f"{l1}.ffn.down.weight", f"{l0}.ffn.down.weight"),
        f"{l1}.ffn.down",
        OTHER,
    )
    yield graph(
        "llama", "residual missing", leave_out(f"{l0}.attn_residual", 1), f"{l0}.attn_residual {l0}.ffn_norm", MISSING
    )
    yield graph(
        "llama",
        "second residual missing",
        leave_out(f"{l0}.ffn_residual", 1),
        f"{l0}.ffn_residual {l1}.attn_norm",
        MISSING,
        "module",
    )
    yield graph("llama", "norm missing", leave_out(f"{l1}.ffn_norm"), f"{l1}.ffn_norm", MISSING, "module")
    yield graph("llama", "last norm missing", leave_out("final_norm"), "final_norm", MISSING)
    yield graph("llama", "head tied", copy_param("lm_head.weight", "embed.weight"), "lm_head", OTHER, "module")
    yield graph(
        "llama",
        "embedding of a token",
        set_param("embed.weight", lambda w: w * (np.arange(97) != 57)[:, None]),
        "embed",
        ["positions"],
    )
    yield onnx_file(
        "llama", "epsilon", set_attribute(f"{l0}.ffn_norm", "epsilon", 1e-3), f"{l0}.ffn_norm", ["eps", "epsilon"]
    )
    yield onnx_file(
        "llama",
        "window",
        set_attribute(f"{l1}.attn.attention", "local_window_size", 4),
        f"{l1}.attn.attention",
        ["window"],
    )
    yield onnx_file(
        "llama",
        "scale",
        set_attribute(f"{l0}.attn.attention", "scale", 0.25),
        f"{l0}.attn.attention",
        ["scale"],
        "module",
    )
    yield onnx_file(
        "llama",
        "packed q, k, v",
        set_initializer(f"{l1}.attn.qkv.weight", lambda w: np.roll(w, 8, 0)),
        f"{l1}.attn.q {l1}.attn.k {l1}.attn.v {l1}.attn.qkv",
        ["permuted heads", "features", "other"],
    )
    yield onnx_file(
        "llama", "row of up", set_initializer(f"{l0}.ffn.up.weight", zero_row), f"{l0}.ffn.up", ["features"]
    )
    yield onnx_file(
        "llama", "o in int8", set_initializer(f"{l0}.attn.o.weight", int8), f"{l0}.attn.o", ROUNDING, "module"
    )
    yield onnx_file(
        "llama",
        "interleaved",
        set_attribute(f"{l1}.attn.k_rope", "interleaved", 1),
        f"{l1}.attn.k_rope",
        ["interleaved"],
    )
    yield onnx_file(
        "llama",
        "element of down",
        set_initializer(f"{l1}.ffn.down.weight", spoil_element),
        f"{l1}.ffn.down",
        ["features"],
        "module",
    )
    yield module(
        "llama",
        "eps of a norm",
        set_field("model.layers.1.input_layernorm", "variance_epsilon", 1e-2),
        f"{l1}.attn_norm",
        ["eps", "epsilon"],
        "onnx",
    )
    yield module(
        "llama", "scale", set_field("model.layers.0.self_attn", "scaling", 0.5), f"{l0}.attn.attention", ["scale"]
    )
    yield module(
        "llama",
        "o transposed",
        set_parameter("model.layers.1.self_attn.o_proj.weight", transpose),
        f"{l1}.attn.o",
        ["transposed"],
        "onnx",
    )
    yield module(
        "llama", "activation", set_activation("model.layers.0.mlp", "act_fn", "gelu"), f"{l0}.ffn.glu", ["activation"]
    )
    # GPT-2: layer norms, biases, learned positions, tied head
    yield graph(
        "gpt2", "erf for tanh", set_attrs(f"{l0}.ffn.gelu", approximate="none"), f"{l0}.ffn.gelu", ["approximate"]
    )
    yield graph(
        "gpt2",
        "erf for tanh",
        set_attrs(f"{l1}.ffn.gelu", approximate="none"),
        f"{l1}.ffn.gelu",
        ["approximate"],
        "module",
    )
    yield graph("gpt2", "eps", set_attrs(f"{l0}.ffn_norm", eps=1e-3), f"{l0}.ffn_norm", ["eps", "epsilon"])
    yield graph(
        "gpt2", "bias of q", set_param(f"{l0}.attn.q.bias", drop), f"{l0}.attn.q", ["bias", "missing bias"], "module"
    )
    yield graph(
        "gpt2", "bias of down", set_param(f"{l1}.ffn.down.bias", drop), f"{l1}.ffn.down", ["bias", "missing bias"]
    )
    yield graph(
        "gpt2",
        "bias of a norm",
        set_param(f"{l1}.attn_norm.bias", drop),
        f"{l1}.attn_norm",
        ["bias", "missing bias"],
        "module",
    )
    yield graph("gpt2", "position offset", shift_positions("positions"), "positions", ["offset"])
    yield graph(
        "gpt2", "positions missing", leave_out("positions_added"), f"positions_added {l0}.attn_norm", MISSING, "module"
    )
    yield graph("gpt2", "o transposed", set_param(f"{l1}.attn.o.weight", transpose), f"{l1}.attn.o", ["transposed"])
    yield graph(
        "gpt2",
        "heads before o",
        set_param(f"{l0}.attn.o.weight", permute_heads(4, [3, 2, 1, 0], 1)),
        f"{l0}.attn.o",
        ["permuted heads"],
        "module",
    )
    yield graph(
        "gpt2", "column of up", set_param(f"{l0}.ffn.up.weight", double_column), f"{l0}.ffn.up", ["input feature"]
    )
    yield onnx_file(
        "gpt2",
        "gelu",
        set_attribute(f"{l0}.ffn.gelu", "approximate", "none"),
        f"{l0}.ffn.gelu",
        ["approximate"],
        "module",
    )
    yield onnx_file(
        "gpt2", "bias of up", set_initializer(f"{l1}.ffn.up.bias", drop), f"{l1}.ffn.up", ["bias", "missing bias"]
    )
    yield onnx_file(
        "gpt2",
        "weight of a norm",
        set_initializer(f"{l1}.ffn_norm.weight", lambda w: w + 1),
        f"{l1}.ffn_norm",
        ["offset of 1"],
    )
    yield onnx_file(
        "gpt2",
        "positions",
        set_initializer("positions.weight", lambda w: np.roll(w, -1, 0)),
        "positions",
        ["shifted", "offset"],
    )
    yield module(
        "gpt2",
        "q and k exchanged",
        set_parameter(
            "transformer.h.0.attn.c_attn.weight", lambda w: np.concatenate([w[:, 32:64], w[:, :32], w[:, 64:]], 1)
        ),
        f"{l0}.attn.q {l0}.attn.k",
        OTHER,
    )
    yield module(
        "gpt2",
        "activation",
        set_activation("transformer.h.1.mlp", "act", "gelu"),
        f"{l1}.ffn.gelu",
        ["approximate"],
        "onnx",
    )
    yield module(
        "gpt2",
        "bias of o",
        set_parameter("transformer.h.0.attn.c_proj.bias", drop),
        f"{l0}.attn.o",
        ["bias", "missing bias"],
    )
    # Gemma 2: scaled embedding, norms of 1 + w, softcaps, alternating windows
    yield graph(
        "gemma2", "softcap", set_attrs(f"{l0}.attn.attention", softcap=3.0), f"{l0}.attn.attention", ["softcap"]
    )
    yield graph(
        "gemma2",
        "no softcap",
        set_attrs(f"{l1}.attn.attention", softcap=None),
        f"{l1}.attn.attention",
        ["softcap"],
        "module",
    )
    yield graph(
        "gemma2",
        "window − 1",
        set_attrs(f"{l0}.attn.attention", window=5),
        f"{l0}.attn.attention",
        ["window"],
        "module",
    )
    yield graph("gemma2", "window + 1", set_attrs(f"{l0}.attn.attention", window=7), f"{l0}.attn.attention", ["window"])
    yield graph(
        "gemma2",
        "window in the wrong layer",
        set_attrs(f"{l1}.attn.attention", window=6),
        f"{l1}.attn.attention",
        ["window"],
    )
    yield graph(
        "gemma2",
        "embedding not scaled",
        leave_out("embed_scaled"),
        f"embed_scaled {l0}.attn_norm",
        [*MISSING, "factor", "by"],
    )
    yield graph(
        "gemma2",
        "norm of w",
        set_param(f"{l1}.ffn_norm.weight", lambda w: w - 1),
        f"{l1}.ffn_norm",
        ["offset of 1"],
        "module",
    )
    yield graph("gemma2", "scale", set_attrs(f"{l1}.attn.attention", scale=8**-0.5), f"{l1}.attn.attention", ["scale"])
    yield graph(
        "gemma2", "norm after attention missing", leave_out(f"{l0}.attn_post_norm"), f"{l0}.attn_post_norm", MISSING
    )
    yield graph(
        "gemma2",
        "norm after feed-forward missing",
        leave_out(f"{l1}.ffn_post_norm"),
        f"{l1}.ffn_post_norm",
        MISSING,
        "module",
    )
    yield graph(
        "gemma2", "activation", set_attrs(f"{l0}.ffn.glu", activation="gelu"), f"{l0}.ffn.glu", ["activation"], "module"
    )
    yield graph("gemma2", "softcap of logits", set_attrs("affine", by=1 / 50), "affine", ["by", "factor"])
    yield onnx_file(
        "gemma2",
        "epsilon",
        set_attribute(f"{l1}.attn_norm", "epsilon", 1.0),
        f"{l1}.attn_norm",
        ["eps", "epsilon"],
        "module",
    )
    yield module(
        "gemma2",
        "softcap",
        set_field("model.layers.1.self_attn", "attn_logit_softcapping", 4.0),
        f"{l1}.attn.attention",
        ["softcap"],
    )
    yield module(
        "gemma2",
        "norm",
        set_parameter("model.layers.0.post_attention_layernorm.weight", lambda w: w + 1),
        f"{l0}.attn_post_norm",
        ["offset of 1"],
        "onnx",
    )
    # Mixtral: routed experts
    yield graph("mixtral", "number of experts", set_attrs(f"{l0}.ffn.route", k=1), f"{l0}.ffn.route", ["k"])
    yield graph(
        "mixtral",
        "not renormalized",
        set_attrs(f"{l1}.ffn.route", renormalize=False),
        f"{l1}.ffn.route",
        ["renormalize"],
        "module",
    )
    yield graph("mixtral", "scores", set_attrs(f"{l1}.ffn.route", scoring="sigmoid"), f"{l1}.ffn.route", ["scoring"])
    yield graph(
        "mixtral",
        "gate and up exchanged",
        exchange_params(f"{l0}.ffn.experts.gate", f"{l0}.ffn.experts.up"),
        f"{l0}.ffn.moe",
        ["exchanged operands", *OTHER],
        "module",
    )
    yield graph(
        "mixtral",
        "order of experts",
        set_param(f"{l1}.ffn.experts.down", lambda w: w[::-1]),
        f"{l1}.ffn.moe",
        ["reversed"],
    )
    yield graph(
        "mixtral", "router in bf16", set_param(f"{l0}.ffn.router.weight", bf16), f"{l0}.ffn.router", ROUNDING, "module"
    )
    yield graph(
        "mixtral",
        "activation",
        set_attrs(f"{l0}.ffn.moe", activation="gelu"),
        f"{l0}.ffn.moe",
        ["activation"],
        "module",
    )
    yield graph(
        "mixtral", "experts scaled", set_param(f"{l1}.ffn.experts.down", scale(1.01)), f"{l1}.ffn.moe", ["factor"]
    )
    yield graph("mixtral", "eps", set_attrs(f"{l1}.ffn_norm", eps=1e-3), f"{l1}.ffn_norm", ["eps", "epsilon"])
    yield onnx_file(
        "mixtral", "number of experts", set_attribute(f"{l1}.ffn.moe", "k", 1), f"{l1}.ffn.route {l1}.ffn.moe", ["k"]
    )
    # Mamba
    yield graph(
        "mamba",
        "no activation",
        set_attrs(f"{l0}.attn.conv", activation="identity"),
        f"{l0}.attn.conv {l0}.attn.x",
        ["activation", *MISSING],
        "module",
    )
    yield graph(
        "mamba",
        "convolution reversed",
        set_param(f"{l1}.attn.conv.weight", lambda w: w[:, ::-1]),
        f"{l1}.attn.conv",
        ["reversed"],
        "module",
    )
    yield graph("mamba", "bias of Δ", set_param(f"{l0}.attn.dt.bias", drop), f"{l0}.attn.dt", ["bias", "missing bias"])
    yield graph(
        "mamba", "A not negated", leave_out(f"{l0}.attn.a"), f"{l0}.attn.a {l0}.attn.selective_scan", ["sign", *MISSING]
    )
    yield graph(
        "mamba", "softplus missing", leave_out(f"{l1}.attn.delta"), f"{l1}.attn.delta {l1}.attn.selective_scan", MISSING
    )
    yield graph(
        "mamba", "D missing", set_param(f"{l1}.attn.d", drop), f"{l1}.attn.selective_scan", ["missing bias", *MISSING]
    )
    yield graph(
        "mamba",
        "gate not activated",
        leave_out(f"{l0}.attn.swish"),
        f"{l0}.attn.swish {l0}.attn.gated",
        MISSING,
        "module",
    )
    yield graph("mamba", "eps", set_attrs(f"{l1}.attn_norm", eps=1e-3), f"{l1}.attn_norm", ["eps", "epsilon"])
    yield graph(
        "mamba",
        "B and C exchanged",
        lambda g: (
            set_operand(f"{l0}.attn.selective_scan", 3, f"{l0}.attn.c")(g),
            set_operand(f"{l0}.attn.selective_scan", 4, f"{l0}.attn.b")(g),
        ),
        f"{l0}.attn.selective_scan",
        ["exchanged operands"],
    )  # type: ignore[arg-type,return-value]
    yield graph(
        "mamba",
        "residual missing",
        leave_out(f"{l0}.attn_residual", 1),
        f"{l0}.attn_residual {l1}.attn_norm",
        MISSING,
        "module",
    )
    yield onnx_file(
        "mamba", "output in bf16", set_initializer(f"{l1}.attn.out.weight", bf16), f"{l1}.attn.out", ROUNDING
    )
    # BERT
    yield graph("bert", "eps", set_attrs("embed_norm", eps=1e-3), "embed_norm", ["eps", "epsilon"])
    yield graph(
        "bert",
        "tanh for erf",
        set_attrs(f"{l0}.ffn.gelu", approximate="tanh"),
        f"{l0}.ffn.gelu",
        ["approximate"],
        "module",
    )
    yield graph(
        "bert", "causal", set_attrs(f"{l1}.attn.attention", causal=True), f"{l1}.attn.attention", ["causal"], "module"
    )
    yield graph("bert", "bias of v", set_param(f"{l0}.attn.v.bias", drop), f"{l0}.attn.v", ["bias", "missing bias"])
    yield graph(
        "bert",
        "heads of v",
        set_param(f"{l1}.attn.v.weight", permute_heads(4, [2, 3, 0, 1])),
        f"{l1}.attn.v",
        ["permuted heads"],
        "module",
    )
    yield graph(
        "bert",
        "token types missing",
        leave_out("token_types_added"),
        "token_types_added positions_added embed_norm",
        MISSING,
    )
    yield graph(
        "bert",
        "positions",
        set_param("positions.weight", lambda w: np.roll(w, 1, 0)),
        "positions",
        ["shifted", "offset"],
        "module",
    )
    yield onnx_file(
        "bert",
        "q transposed",
        set_initializer(f"{l1}.attn.o.weight", transpose),
        f"{l1}.attn.o {l1}.attn.FusedMatMul_2.out",
        ["transposed"],
        "module",
    )
    # BART
    yield graph(
        "bart",
        "not causal",
        set_attrs("decoder.layers.0.attn.attention", causal=False),
        "decoder.layers.0.attn.attention",
        ["causal"],
    )
    yield graph(
        "bart",
        "offset of positions",
        set_attrs("decoder.positions_rows", plus=1.0),
        "decoder.positions_rows decoder.positions",
        ["plus", "offset"],
        "module",
    )
    yield graph(
        "bart",
        "k of cross-attention",
        copy_param("decoder.layers.1.cross.k.weight", "decoder.layers.0.cross.k.weight"),
        "decoder.layers.1.cross.k",
        OTHER,
        "module",
    )
    yield graph(
        "bart",
        "k and v of cross-attention exchanged",
        exchange_params("decoder.layers.0.cross.k.weight", "decoder.layers.0.cross.v.weight"),
        "decoder.layers.0.cross.k decoder.layers.0.cross.v",
        OTHER,
    )
    yield graph(
        "bart",
        "residual of the encoder",
        leave_out("encoder.layers.0.attn_residual", 1),
        "encoder.layers.0.attn_residual encoder.layers.0.attn_norm",
        MISSING,
    )
    yield graph(
        "bart",
        "encoder output before its last norm",
        set_operand("decoder.layers.0.cross.k", 0, "encoder.layers.1.ffn_residual"),
        "decoder.layers.0.cross.k",
        ["other operand"],
    )


def inject_graph(fault: Fault, graph: Graph) -> Graph:
    """Return a copy of `graph` with the fault."""
    faulty = graph.clone()
    fault.inject(faulty)
    return run_passes(faulty, "dce")


def inject_module(fault: Fault, module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of `module` with the fault."""
    faulty = copy.deepcopy(module)
    fault.inject(faulty)
    return faulty
