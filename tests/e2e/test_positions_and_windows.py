"""Surgery on positions and windows against transformers: a checkpoint rewritten by passes equals the model whose config
asks for the same. Texts of 24 tokens cross windows of 8 and original contexts of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import weft
from weft.ir import Graph, WeftError, interpret
from weft.passes import run_passes

from .families import COMMON, GQA, LENGTH, MHA, ROWS, TIED, UNTIED, VOCAB, WINDOW, Row, error, reference
from .families.gemma import GEMMA2, GEMMA3_ROPES
from .families.sizes import CLASSIC, LOCAL_GLOBAL, ROPES, SLIDING

TOLERANCE = 1e-4
SHORTEN = "max_position_embeddings"
SHORT = {SHORTEN: 16}
ALL_GLOBAL = {
    "layer_types": ["full_attention"] * 3,
    "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in GEMMA3_ROPES},
}


def theta(base: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


@dataclass(frozen=True)
class Case:
    """A model of transformers, and the passes that make it out of the weights read with `read` for a config.

    `sees`, if given, is what its attentions see besides causality: no config says it, but a mask does.
    """

    model: str
    config: dict[str, Any]
    read: dict[str, Any]
    passes: str
    sees: Callable[[int, int], bool] | None = field(default=None, compare=False)


LLAMA = COMMON | GQA | UNTIED
SMOL = COMMON | GQA | TIED
NOPE = {"no_rope_layers": [0, 0, 0]}
CASES = {
    # positions
    "insert-rope": Case(
        "SmolLM3ForCausalLM", SMOL | {"no_rope_layers": [1, 1, 1]} | theta(500.0), SMOL | NOPE, "insert-rope{theta=500}"
    ),
    "insert-rope, some layers": Case(
        "SmolLM3ForCausalLM",
        SMOL | {"no_rope_layers": [1, 0, 1]} | theta(10_000.0),
        SMOL | NOPE,
        "pack-qkv, insert-rope{layers=even}",
    ),
    "strip-positions": Case("SmolLM3ForCausalLM", SMOL | NOPE, SMOL | {"no_rope_layers": [1, 1, 1]}, "strip-positions"),
    "insert-rope, another base": Case(
        "LlamaForCausalLM", LLAMA | theta(300.0), LLAMA, "strip-positions, insert-rope{theta=300}"
    ),
    "insert-rope, interleaved, part of a head": Case(
        "GPTJForCausalLM",
        CLASSIC | {"rotary_dim": 12},
        CLASSIC | {"rotary_dim": 16},
        "strip-positions, insert-rope{rotary_dim=12, layout=interleaved}",
    ),
    "insert-rope, behind norms": Case(
        "Qwen3ForCausalLM",
        COMMON | GQA | UNTIED | {"head_dim": 32} | theta(700.0),
        COMMON | GQA | UNTIED | {"head_dim": 32},
        "strip-positions, pack-qkv, insert-rope{theta=700}",
    ),
    "insert-rope, scaled": Case(
        "LlamaForCausalLM",
        LLAMA | {"rope_parameters": ROPES["yarn"] | {"rope_theta": 10_000.0}},
        LLAMA,
        "strip-positions, insert-rope{scaling=yarn, factor=4, original=16}",
    ),
    # contexts
    **{
        f"extend-context, {method}": Case(
            "LlamaForCausalLM", LLAMA | {"rope_parameters": rope | {"rope_theta": 10_000.0}}, LLAMA | SHORT, passes
        )
        for method, rope, passes in (
            ("pi", ROPES["linear"], "extend-context{method=pi, factor=3}"),
            ("yarn", ROPES["yarn"], "extend-context{method=yarn, factor=4}"),
            (
                "yarn, exact bounds",
                ROPES["yarn"] | {"beta_fast": 4.0, "beta_slow": 0.3, "truncate": False},
                "pack-qkv, extend-context{method=yarn, factor=4, beta_fast=4, beta_slow=0.3, truncate=false}",
            ),
            ("llama3", ROPES["llama3"], "extend-context{method=llama3, factor=4}"),
            (
                "llama3, other turns",
                ROPES["llama3"] | {"low_freq_factor": 0.5, "high_freq_factor": 2.0},
                "extend-context{method=llama3, factor=4, low_freq=0.5, high_freq=2}",
            ),
        )
    },
    "extend-context, ntk": Case(
        "LlamaForCausalLM",
        LLAMA | theta(10_000.0 * 4 ** (16 / 14)),
        LLAMA | SHORT,
        "extend-context{method=ntk, factor=4}",
    ),
    # windows
    "sliding-window": Case(
        "MistralForCausalLM",
        COMMON | GQA | UNTIED | {"sliding_window": WINDOW, "head_dim": 16},
        COMMON | GQA | UNTIED | {"sliding_window": None, "head_dim": 16},
        "sliding-window{size=8}",
    ),
    "sliding-window, some layers": Case(
        "Qwen2ForCausalLM",
        COMMON | MHA | UNTIED | SLIDING,
        COMMON | MHA | UNTIED,
        'sliding-window{size=8, layers="1-2"}',
    ),
    "local-global": Case(
        "Gemma3ForCausalLM",
        COMMON | MHA | UNTIED | GEMMA2 | {"rope_parameters": GEMMA3_ROPES, "layer_types": LOCAL_GLOBAL},
        COMMON | MHA | UNTIED | GEMMA2 | ALL_GLOBAL,
        'local-global{pattern="2:1", window=8, theta_local=100, theta_global=5000},'
        "extend-context{method=pi, factor=8, layers=-1}",
    ),
    # what only a mask says
    "sliding-window with sinks": Case(
        "LlamaForCausalLM", LLAMA, LLAMA, "sliding-window{size=5, keep_first=2}", lambda i, j: i - j < 5 or j < 2
    ),
    "dilate": Case("LlamaForCausalLM", LLAMA, LLAMA, "dilate{size=4, stride=3}", lambda i, j: i - j in (0, 3, 6, 9)),
    "strided": Case(
        "LlamaForCausalLM",
        LLAMA,
        LLAMA,
        "attention-pattern{pattern=strided, stride=5}",
        lambda i, j: i - j < 5 or (i - j) % 5 == 0,
    ),
    "fixed, with a sink": Case(
        "LlamaForCausalLM",
        LLAMA,
        LLAMA,
        "attention-pattern{pattern=fixed, stride=6, summary=2, keep_first=1}",
        lambda i, j: i // 6 == j // 6 or j % 6 in (4, 5) or j == 0,
    ),
    "chunked": Case(
        "LlamaForCausalLM",
        LLAMA,
        LLAMA,
        "attention-pattern{pattern=chunked, stride=7}",
        lambda i, j: i // 7 == j // 7,
    ),
}


def expected(case: Case, folder: Path) -> np.ndarray:
    """The logits of the model, whose weights are then in `folder` with the config `case.read`."""
    model = Row(case.model, case.config).save(folder)
    getattr(transformers, case.model).config_class(**case.read).save_pretrained(folder)
    ids = text()
    if case.sees is None:
        return reference(model, ids)[0]
    seen = [[j <= i and case.sees(i, j) for j in range(LENGTH)] for i in range(LENGTH)]
    mask = torch.where(torch.tensor(seen), 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        return model(torch.from_numpy(ids), attention_mask=mask, use_cache=False).logits[0].numpy()


def text() -> np.ndarray:
    return np.random.default_rng(1).integers(3, VOCAB, (1, LENGTH))


def agrees(source: Path | Graph, out: Path, target: str, passes: str, want: np.ndarray) -> None:
    """Compiled with `passes`, it gives `want`: as one full pass, in chunks and token by token, through caches that come
    after the surgery."""
    weft.compile(source, out, target=target, passes=f"{passes}, -last-token-logits", max_length=LENGTH)
    ours = weft.load(out)
    for chunk in (LENGTH, 5, 1):
        assert error(ours.logits(text()[0].tolist(), chunk=chunk), want) <= TOLERANCE


def interpreted(graph: Graph) -> np.ndarray:
    inputs = {"input_ids": text(), "position_ids": np.arange(LENGTH)[None]}
    return interpret(graph, {name: inputs[name] for name in graph.inputs})["logits"][0]


@pytest.mark.halved
@pytest.mark.parametrize("name", CASES)
def test_rewritten_positions_equal_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    want = expected(case, tmp_path / "hf")
    graph = weft.load_source(tmp_path / "hf").graph
    assert error(interpreted(graph), want) > 100 * TOLERANCE  # before the surgery it is another model
    rewritten = run_passes(graph, case.passes)
    assert error(interpreted(rewritten), want) <= TOLERANCE
    agrees(tmp_path / "hf", tmp_path / "onnx", "onnx", f"{case.passes}, default", want)
    agrees(rewritten, tmp_path / "ort", "ort-cpu", "default", want)


@pytest.mark.parametrize("target", ["onnx", "ort-cpu"])
@pytest.mark.parametrize(("name", "held"), [("sliding-window", 8), ("sliding-window with sinks", 5 + 2)])
def test_inserted_windows_use_rolling_caches(name: str, held: int, target: str, tmp_path: Path) -> None:
    """The caches of a window that was slid in hold it alone, and the sinks beside it."""
    want = expected(CASES[name], tmp_path / "hf")
    graph = run_passes(weft.load_source(tmp_path / "hf").graph, CASES[name].passes)
    agrees(graph, tmp_path / "out", target, "default", want)
    cached = run_passes(graph, "default")
    assert {v.shape[2] for name, v in cached.inputs.items() if name.startswith("past")} == {held}


# -- models whose positions are parameters


def tables(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The learned positions of `model`: tables, and T5's biases."""
    names = ("wpe.weight", "embed_positions.weight", "relative_attention_bias.weight")
    return {name: p for name, p in model.state_dict().items() if name.endswith(names)}


@pytest.mark.parametrize("name", ["gpt2-tied", "opt", "gpt_neo"])
def test_stripped_position_tables_equal_zero_tables(name: str, tmp_path: Path) -> None:
    model = ROWS[name].save(tmp_path / "hf")
    for table in tables(model).values():
        table.zero_()
    want = reference(model, text())[0]
    graph = weft.load_source(tmp_path / "hf").graph
    assert error(interpreted(graph), want) > 100 * TOLERANCE
    agrees(graph, tmp_path / "out", "ort-cpu", "strip-positions, default", want)


@pytest.mark.parametrize(("name", "size", "offset"), [("gpt2-tied", "n_positions", 0), ("opt", SHORTEN, 2)])
def test_interpolated_position_tables_equal_transformers(name: str, size: str, offset: int, tmp_path: Path) -> None:
    """Position 2.5 of a table is between its rows 2 and 3; there is nothing behind the last."""
    row, factor = ROWS[name], 2.5
    small = Row(row.model, row.config | {size: 10}).save(tmp_path / "hf")
    wide = Row(row.model, row.config | {size: 25}).save(tmp_path / "wide")
    weights = small.state_dict()
    for name, table in tables(small).items():
        rows = table[offset:].numpy().T
        longer = np.stack([np.interp(np.arange(25) / factor, np.arange(10), column) for column in rows], 1)
        weights[name] = torch.cat([table[:offset], torch.from_numpy(longer).float()])
    wide.load_state_dict(weights)
    want = reference(wide, text())[0]
    graph = run_passes(weft.load_source(tmp_path / "hf").graph, "extend-context{method=pi, factor=2.5}")
    assert (graph.meta["context"], graph.meta["max_positions"]) == (25, 25)
    agrees(graph, tmp_path / "onnx", "onnx", "default", want)
    agrees(tmp_path / "hf", tmp_path / "ort", "ort-cpu", "extend-context{method=pi, factor=2.5}, default", want)


def test_extended_context_is_reported_and_compiled(tmp_path: Path) -> None:
    Row("GPT2LMHeadModel", CLASSIC | {"n_positions": 10}).save(tmp_path / "hf")
    longer = "extend-context{method=pi, factor=2}, default"
    report = weft.compile(tmp_path / "hf", tmp_path / "out", passes=longer)
    assert report.notes == ["passes extend the context to 20 tokens, but the length is 10: raise --max-length"]
    assert not weft.compile(tmp_path / "hf", tmp_path / "out", passes=longer, max_length=20).notes
    with pytest.raises(WeftError, match="--max-length 21 exceeds the model's 20 learned positions"):
        weft.compile(tmp_path / "hf", tmp_path / "out", passes=longer, max_length=21)
