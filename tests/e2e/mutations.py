"""Single-key changes of the configs of the table test: what transformers makes of each is the oracle.

A case is a row, a key of its config (or one that other families have) and another value for it. transformers builds the
changed model; weft must compute the same, or refuse in a sentence that names the key. ``python -m tests.e2e.mutations
[ROW ...]`` runs all cases of the rows named, or of all, and prints those that are neither.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.frontends import load_source
from weft.ir import WeftError, interpret
from weft.ir.graph import Graph

from .families import LENGTH, ROWS, VOCAB, Row, encoder_case, error, reference

TOLERANCE = 1e-4
Text = np.ndarray | dict[str, np.ndarray]  # token ids [1, seq] of a decoder, the inputs of an encoder
# Not of the architecture: names, tokens, training, generation, and what counts memory.
SKIPPED = (
    *("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "id2label"),
    *("label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states", "use_cache"),
    *("output_router_logits", "chunk_size_feed_forward", "vocab_size", "is_encoder_decoder", "num_labels"),
)
IGNORED_ENDS = ("_token_id", "dropout", "pdrop", "_range", "_coef", "_std_dev", "_plan", "initializer_factor")
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "relu", "relu2", "quick_gelu", "tanh", "mish")
# Keys that mean something in many families: tried where the config does not have them.
STRAY: dict[str, Any] = {
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "sliding_window": 8,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "qkv_bias": True,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "activation_function": "relu",
    "rope_theta": 77.0,
    "clip_qkv": 0.5,
    "qk_layernorm": True,
    "use_qk_norm": True,
    "logit_scale": 0.5,
    "logits_scaling": 2.0,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "scale_embedding": True,
    "query_pre_attn_scalar": 7,
    "rms_norm_eps": 0.1,
    "layer_norm_eps": 0.1,
    "layer_norm_epsilon": 0.1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 3.0,
    "intermediate_size": 56,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
}


@dataclass(frozen=True)
class Case:
    """The config of `row` with `value` under `key`, ``outer.inner`` for one inside a mapping."""

    row: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.row}: {self.key}={self.value!r}"


def cases(name: str) -> Iterator[Case]:
    """Every case of the row `name`."""
    row = ROWS[name]
    config = json.loads(row.config_class(**row.config).to_json_string(use_diff=False))
    for key, value in config.items():
        if key in SKIPPED or key.endswith(IGNORED_ENDS):
            continue
        inner = value if isinstance(value, dict) and key in ("rope_parameters", "attn_config", "ffn_config") else {}
        for part, number in inner.items():
            if part not in SKIPPED and not part.endswith(IGNORED_ENDS):
                yield from (Case(name, f"{key}.{part}", v) for v in others(part, number))
        if not inner:
            yield from (Case(name, key, v) for v in others(key, value))
    yield from (Case(name, key, value) for key, value in STRAY.items() if key not in config)


def others(key: str, value: Any) -> list[Any]:
    """Other values for a `key` that has `value`."""
    if isinstance(value, bool):
        return [not value]
    if key.endswith(("_act", "activation", "activation_function", "act_fn")) and isinstance(value, str):
        return [name for name in ACTIVATIONS if name != value]
    if isinstance(value, int):
        return sorted({value * 2, max(value // 2, 1), value + 1} - {value})
    if isinstance(value, float):
        return [value * 2, value / 2, *([] if "theta" in key else [0.25])]
    if isinstance(value, list) and value:
        return [value[::-1], [value[0]] * len(value), [value[-1]] * len(value)]
    return [STRAY[key]] if value is None and key in STRAY else []


def changed(row: Row, case: Case) -> dict[str, Any]:
    """The arguments of the config of `case`."""
    config = copy.deepcopy(row.config)
    outer, _, part = case.key.rpartition(".")
    if outer:
        whole = json.loads(row.config_class(**row.config).to_json_string(use_diff=False))
        config[outer] = {**{k: v for k, v in whole[outer].items() if k not in SKIPPED}, part: case.value}
    else:
        config[case.key] = case.value
    return config


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what transformers prints to itself."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def result(case: Case) -> str:
    """Return ``equal``, ``refused``, ``no model`` where transformers makes none, or what is wrong."""
    row = replace(ROWS[case.row], config=changed(ROWS[case.row], case))
    if row.family == "falcon":
        row = replace(row, attention="sdpa")  # eager Falcon adds ALiBi twice
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            model = row.save(Path(folder))
            texts, want = asked(row, model)
        except Exception:  # of any kind: the model is transformers' to refuse
            return "no model"
        if not all(np.isfinite(w).all() and np.abs(w).max() <= 1e4 for w in want):
            return "no model"
        try:
            graph = load_source(Path(folder)).graph
        except WeftError as e:
            names = case.key.split(".")
            return "refused" if any(name in str(e) for name in names) else f"refused without the key: {e}"
        found = np.inf
        # Of texts: in one a router's scores may be as near to each other as f32 is to f64.
        for ids, w in zip(texts, want, strict=True):
            got = computed(graph, ids)
            found = min(found, error(got, w) if got.shape == w.shape else np.inf)
            if found <= TOLERANCE:
                return "equal"
    return f"wrong by {found:.1e}"


def asked(row: Row, model: torch.nn.Module) -> tuple[list[Text], list[np.ndarray]]:
    """Return texts, and what transformers computes: logits of a decoder, vectors [tokens, dim] of an encoder."""
    if row.is_encoder:
        arguments, want, valid = encoder_case(row, model)
        return [arguments], [want["last_hidden_state"][valid]]
    texts = [np.random.default_rng(seed).integers(3, VOCAB, (1, LENGTH)) for seed in (1, 2, 3)]
    return [*texts], [reference(model, ids)[0] for ids in texts]


def computed(graph: Graph, ids: Text) -> np.ndarray:
    """Compute in float64 the logits [seq, vocab] of `graph`, or of an encoder the vectors of all tokens but padding."""
    if isinstance(ids, dict):
        made = interpret(graph, {name: ids[name] for name in graph.inputs})["last_hidden_state"]
        return np.asarray(made[ids["attention_mask"] != 0])
    feeds: dict[str, np.ndarray] = {"input_ids": ids}
    if "position_ids" in graph.inputs:
        feeds["position_ids"] = np.arange(ids.shape[1])[None]
    return np.asarray(interpret(graph, feeds)["logits"][0])


def main(names: list[str]) -> None:
    """Run all cases of the rows `names`, or of all decoders and encoders."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for name in names or [name for name, row in ROWS.items() if row.is_decoder or row.is_encoder]:
        for case in cases(name):
            found = result(case)
            counts[found.split(" ")[0]] += 1
            if found not in ("equal", "refused", "no model"):
                print(case, "->", found[:200], flush=True)
    print(dict(counts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
