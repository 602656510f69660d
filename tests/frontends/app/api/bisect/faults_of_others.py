"""Faults of models with other parts than Llama, each under its name."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.ir.graph import Graph

from .fault_edits import (
    MISSING,
    OTHER,
    ROUNDING,
    bf16,
    copy_param,
    double_column,
    drop,
    exchange_params,
    leave_out,
    permute_heads,
    scale,
    set_activation,
    set_attribute,
    set_attrs,
    set_field,
    set_initializer,
    set_operand,
    set_param,
    set_parameter,
    shift_positions,
    transpose,
)
from .faults import Fault, graph, module, onnx_file


def exchange_states(scan: Graph) -> None:
    """Let the scan of the first layer read B as C and C as B."""
    for index, name in ((3, "c"), (4, "b")):
        set_operand("layers.0.attn.selective_scan", index, f"layers.0.attn.{name}")(scan)


def list_other_faults() -> Iterator[Fault]:
    """Yield all of them."""
    l0, l1 = "layers.0", "layers.1"
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
    yield graph("gpt2", "position offset", shift_positions("positions"), "positions", ["offset", *MISSING])
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
        [*OTHER, "exchanged operands"],
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
        exchange_states,
        f"{l0}.attn.selective_scan",
        ["exchanged operands"],
    )
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
        [*OTHER, "exchanged operands"],
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
