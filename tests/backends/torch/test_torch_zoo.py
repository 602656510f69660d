"""The generated module of every graph of the zoo against the interpreter: at once, in chunks, token by token, in rows
of different lengths, in every dtype. `make test` takes a part of the graphs for each, and all of them for some."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weft.backends.torch.program.stateful_nodes import find_cached_nodes
from weft.ir import Graph, Node, interpret, ops
from weft.passes.analysis.states import SOURCE, find_states
from weft.passes.core.equivalence import EquivalenceCheck

from ...passes.zoo import TRIED
from ...sampling import each
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
NAMES = [n for n in TRIED if not n.startswith("cached/")]
NARROW = [(n, dtype) for n in TRIED for dtype in (torch.bfloat16, torch.float16)]
LONG = 40  # tokens: operators of torch take other paths for more keys than a register of AVX-512 holds


@pytest.mark.halved
@pytest.mark.parametrize("name", each(2, TRIED, 1))
def test_full_pass_agrees_with_the_interpreter(name: str) -> None:
    """The other half of the graphs is tried by the tests below, in parts and whole."""
    graph, module = graph_of(name), module_of(name)
    for got, want in zip(call(module, tensors(feeds_of(name))), wanted(name).values(), strict=True):
        assert_close(got, want, tolerance(graph, torch.float32))
    if any(n.op is ops.attention and _masked(n) for n in graph.nodes):
        check_double(graph, module)


def _masked(node: Node) -> bool:
    """Return whether more than causality decides what the scores of an attention become."""
    extra = (node.operand("bias"), node.attrs["window"], node.attrs["softcap"], node.operand("sinks"))
    return any(x is not None for x in extra)


def check_double(graph: Graph, module: nn.Module) -> None:
    """`.double()` reaches weights only: what forward makes in f32 (slopes, masks) must follow the dtype of queries."""
    feeds = EquivalenceCheck(0).make_inputs(graph, seq=min(LONG, graph.meta.get("max_positions") or LONG))
    made = call(copy.deepcopy(module).double(), tensors(feeds, torch.float64))
    for got, want in zip(made, interpret(graph, feeds).values(), strict=True):
        assert_close(got, want, tolerance(graph, torch.float32))  # angles of RoPE stay in f32


@pytest.mark.halved
@pytest.mark.parametrize("name", each(2, NAMES))
def test_cached_calls_agree_with_the_interpreter(name: str) -> None:
    """Chunks and single tokens give what one pass gives; an encoded text is given once."""
    graph, module = graph_of(name), module_of(name)
    assert accepts(module, "cache") == bool(find_cached_nodes(graph))
    if not find_cached_nodes(graph) or COMPETES.intersection(n.op.name for n in graph.nodes):
        return  # there is nothing to go on from, or tokens of a call compete
    given = tensors(feeds_of(name))
    tokens = {k: v for k, v in given.items() if v.dim() > 1 and v.shape[1] == SEQ and k not in SOURCE}
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


@pytest.mark.parametrize("name", each(2, NAMES))
def test_last_token_logits_select_one_token_of_each_row(name: str) -> None:
    graph, module = graph_of(name), module_of(name)
    assert accepts(module, "last") == bool(find_cached_nodes(graph))
    given, want = tensors(feeds_of(name)), next(iter(wanted(name).values()))
    if accepts(module, "last"):
        last = np.arange(len(want)) * 3 % SEQ
        given, want = {**given, "last": torch.from_numpy(last)}, want[np.arange(len(want)), last][:, None]
    assert_close(call(module, given)[0], want, tolerance(graph, torch.float32))


@pytest.mark.parametrize("name", each(2, NAMES, 1))
def test_padded_rows_agree_with_the_interpreter(name: str) -> None:
    """Rows with padding behind them go on where their own texts end. Where a recurrence has carried the padding along,
    only rows without any do; where tokens of a call compete, padding takes part."""
    graph, module, more = graph_of(name), module_of(name), 2
    if not find_cached_nodes(graph):
        assert not accepts(module, "cache") and not hasattr(module, "new_cache")
        return
    given = {
        k: v[:2]
        for k, v in tensors(EquivalenceCheck(1).make_inputs(graph, seq=SEQ + more)).items()
        if k != "position_ids"
    }
    encoded = {k: v for k, v in given.items() if k in SOURCE}
    tokens = {k: v for k, v in given.items() if k not in encoded}
    lengths, bound = (SEQ, SEQ - 3), tolerance(graph, torch.float32)
    cache, last = new_cache(module, 2, SEQ + more), torch.tensor(lengths) - 1
    padded = {**encoded, **{k: v[:, :SEQ] for k, v in tokens.items()}}
    logits = [call(module, {**padded, "cache": cache, "last": last})[0]]
    if COMPETES.intersection(n.op.name for n in graph.nodes):
        want = call(module, padded)[0][torch.arange(2), last][:, None]
        assert_close(logits[0], want.double().numpy(), bound)
        return
    for i in range(SEQ, SEQ + more):
        now = {k: v[:, i : i + 1] for k, v in tokens.items()}
        logits.append(call(module, {**now, "position_ids": last[:, None] + 1 + i - SEQ, "cache": cache})[0])
    for row, length in enumerate(lengths):
        text = {k: torch.cat((v[row : row + 1, :length], v[row : row + 1, SEQ:]), 1) for k, v in tokens.items()}
        alone = {k: v[row : row + 1] for k, v in encoded.items()}
        want = call(module, {**alone, **text})[0][:, length - 1 :]
        off = errors(torch.cat(logits, 1)[row : row + 1], want.double().numpy()).max((0, 2))
        carried = length < SEQ and any(find_states(n) for n in graph.nodes)
        assert off[0] <= bound and all((off[1:] > bound) if carried else (off[1:] <= bound)), f"row {row}: {off}"


@pytest.mark.parametrize(("name", "dtype"), each(5, NARROW), ids=str)
def test_narrow_dtypes_agree_within_their_precision(name: str, dtype: torch.dtype) -> None:
    """Weights and activations of 8 or 11 bits stay near the interpreter that has the same weights."""
    graph = graph_of(name)
    module = copy.deepcopy(module_of(name)).to(dtype)
    feeds = {k: tensors({k: a}, dtype)[k.replace(".", "_")] for k, a in feeds_of(name).items()}
    exact = {k: (t.double() if t.is_floating_point() else t).numpy() for k, t in feeds.items()}
    want = interpret(rounded(graph, module), exact)
    chooses = CHOOSES.intersection(n.op.name for n in graph.nodes)
    for got, w in zip(call(module, {k.replace(".", "_"): t for k, t in feeds.items()}), want.values(), strict=True):
        # The output of one counts, those of another are angles; masks are integers.
        assert got.dtype == dtype or w.dtype.kind == "i" or name in ("example/fuse-router", "example/fuse-embedding")
        off = errors(got, w)
        found = float(np.median(off.max(-1)) if chooses and off.ndim else off.max(initial=0))
        assert found <= tolerance(graph, dtype), f"{found:.2e} is more than {tolerance(graph, dtype):.2e}"
