"""The generated module of every graph of the zoo against the interpreter: at once, in chunks, token by token, in rows
of different lengths, in every dtype."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from weft.backends.torch.states import cached_nodes
from weft.ir import interpret
from weft.passes.recurrences import states

from ...passes.zoo import ZOO
from .generated import (
    CHOOSES,
    COMPETES,
    SEQ,
    accepts,
    assert_close,
    call,
    errors,
    feeds_of,
    graph_of,
    module_of,
    rounded,
    tensors,
    tolerance,
    wanted,
)

CUTS = [(SEQ,), (2, 3, 1), (1,) * SEQ]


@pytest.mark.parametrize("name", ZOO)
def test_full_pass(name: str) -> None:
    graph, module = graph_of(name), module_of(name)
    for got, want in zip(call(module, tensors(feeds_of(name))), wanted(name).values(), strict=True):
        assert_close(got, want, tolerance(graph, torch.float32))


@pytest.mark.parametrize("name", [n for n in ZOO if not n.startswith("cached/")])
def test_calls_that_share_a_cache(name: str) -> None:
    """Chunks and single tokens give what one pass gives; an encoded text is given once."""
    graph, module = graph_of(name), module_of(name)
    assert accepts(module, "cache") == bool(cached_nodes(graph))
    if not cached_nodes(graph) or COMPETES.intersection(n.op.name for n in graph.nodes):
        return  # there is nothing to go on from, or tokens of a call compete
    given = tensors(feeds_of(name))
    tokens = {k: v for k, v in given.items() if v.dim() > 1 and v.shape[1] == SEQ and not k.startswith("encoder_")}
    rest = {k: v for k, v in given.items() if k not in tokens}
    tokens.pop("position_ids", None)
    want = next(iter(wanted(name).values()))
    for cuts in CUTS:
        cache, made, start = new_cache(module, len(want), SEQ + 2), [], 0
        for n in cuts:
            now = {k: v[:, start : start + n] for k, v in tokens.items()}
            made.append(call(module, {**now, **(rest if start == 0 else {}), "cache": cache})[0])
            start += n
        assert_close(torch.cat(made, 1), want, tolerance(graph, torch.float32))


def new_cache(module: Any, batch: int, length: int) -> Any:
    """Of a generated module, which has such a method if it generates."""
    return module.new_cache(batch, length)


@pytest.mark.parametrize("name", [n for n in ZOO if not n.startswith("cached/")])
def test_rows_of_different_lengths(name: str) -> None:
    """Rows with padding behind them go on where their own texts end."""
    graph, module = graph_of(name), module_of(name)
    known = {"input_ids", "position_ids", "encoder_input_ids", "encoder_attention_mask"}
    joint = (
        set(graph.inputs) - known
        or COMPETES.intersection(n.op.name for n in graph.nodes)
        or any(states(n) for n in graph.nodes)
    )
    if not accepts(module, "cache") or not accepts(module, "last") or joint:
        return
    lengths, more = (SEQ, SEQ - 3), 2
    given = {k: v[:2] for k, v in tensors(feeds_of(name)).items() if k.startswith("encoder_")}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 8, (2, SEQ + more), generator=generator)
    cache = new_cache(module, 2, SEQ + more)
    last = torch.tensor(lengths) - 1
    logits = [call(module, {**given, "input_ids": ids[:, :SEQ], "cache": cache, "last": last})[0]]
    for i in range(more):
        at = torch.tensor(lengths)[:, None] + i
        now = {"input_ids": ids[:, SEQ + i : SEQ + i + 1], "position_ids": at, "cache": cache}
        logits.append(call(module, now)[0])
    for row, length in enumerate(lengths):
        text = torch.cat((ids[row : row + 1, :length], ids[row : row + 1, SEQ:]), 1)
        alone = {k: v[row : row + 1] for k, v in given.items()}
        want = call(module, {**alone, "input_ids": text})[0][:, length - 1 :]
        got = torch.cat(logits, 1)[row : row + 1]
        assert_close(got, want.double().numpy(), tolerance(graph, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", ZOO)
def test_narrow_dtypes(name: str, dtype: torch.dtype) -> None:
    """Weights and activations of 8 or 11 bits stay near the interpreter that has the same weights."""
    graph = graph_of(name)
    module = copy.deepcopy(module_of(name)).to(dtype)
    feeds = {k: tensors({k: a}, dtype)[k.replace(".", "_")] for k, a in feeds_of(name).items()}
    exact = {k: (t.double() if t.is_floating_point() else t).numpy() for k, t in feeds.items()}
    want = interpret(rounded(graph, module), exact)
    chooses = CHOOSES.intersection(n.op.name for n in graph.nodes)
    for got, w in zip(call(module, {k.replace(".", "_"): t for k, t in feeds.items()}), want.values(), strict=True):
        assert got.dtype == dtype or name == "example/fuse-router"  # whose output counts
        off = errors(got, w)
        found = float(np.median(off.max(-1)) if chooses and off.ndim else off.max(initial=0))
        assert found <= tolerance(graph, dtype), f"{found:.2e} is more than {tolerance(graph, dtype):.2e}"
