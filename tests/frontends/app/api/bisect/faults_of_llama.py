"""Faults of Llama: grouped heads, RoPE, RMS norms, gated feed-forward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .fault_edits import (
    MISSING,
    OTHER,
    ROUNDING,
    bf16,
    copy_param,
    exchange_params,
    int8,
    interleave,
    leave_out,
    permute_heads,
    rope_base,
    scale,
    set_activation,
    set_attribute,
    set_attrs,
    set_field,
    set_initializer,
    set_param,
    set_parameter,
    shift_positions,
    spoil_element,
    transpose,
    zero_row,
)
from .faults import Fault, graph, module, onnx_file


def list_llama_faults() -> Iterator[Fault]:
    """Yield all of them."""
    l0, l1 = "layers.0", "layers.1"
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
        ["offset", "missing operation"],
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
        [*OTHER, "exchanged operands"],
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
