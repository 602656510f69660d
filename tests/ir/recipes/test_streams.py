"""Streams: the numbers of the whole in order, and small blocks where the rows of a stack can be read alone."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import MemoryReader
from weft.ir.recipes import combinators as r
from weft.ir.recipes import matrices as mx
from weft.ir.recipes import recipe as base
from weft.ir.recipes import streams

RNG = np.random.default_rng(5)
EXPERTS, OUT, WIDTH = 3, 8, 5
EACH = {f"e{i}": RNG.standard_normal((OUT, WIDTH)).astype(np.float32) for i in range(2 * EXPERTS)}
STACK = RNG.standard_normal((EXPERTS, OUT, WIDTH)).astype(np.float32)
ARCHIVE = MemoryReader({**EACH, "stack": STACK, "row": STACK[0, 0]})


def stacked(first: int = 0) -> r.Recipe:
    return r.Concat(tuple(r.Reshape(r.Source(f"e{first + i}"), (1, OUT, WIDTH)) for i in range(EXPERTS)))


def interleaved(gate: r.Recipe, up: r.Recipe) -> r.Recipe:
    pair = tuple(r.Reshape(part, (EXPERTS, OUT, 1, WIDTH)) for part in (gate, up))
    return r.Reshape(r.Concat(pair, 2), (EXPERTS, 2 * OUT, WIDTH))


PLAIN = r.Reshape(r.Concat(tuple(r.Source(f"e{i}") for i in range(EXPERTS))), (EXPERTS, OUT, WIDTH))
FINE = {
    "stack": stacked(),
    "one above the other": PLAIN,
    "interleaved": interleaved(stacked(), stacked(EXPERTS)),
    "interleaved with zeros": interleaved(PLAIN, r.Full(0.0, (EXPERTS, OUT, WIDTH))),
    "side by side": r.Concat((stacked(), stacked(EXPERTS)), 1),
    "half": r.Slice(stacked(), 1, 1, 7, 2),
    "rounded": r.Cast(r.Map(stacked(), "exp"), "bf16"),
    "two stacks": r.Concat((stacked(), PLAIN)),
    "scaled": r.Scale(stacked(), 2.0),
    "columns scaled": r.Scale(stacked(), r.Source("row"), 2),
    "summed": r.Add((stacked(), PLAIN), 0.5),
    "columns centred": mx.Centre(stacked(), 2),
    "four axes": r.Reshape(stacked(), (EXPERTS, 2, OUT // 2, WIDTH)),
}
WHOLE = {
    "source": r.Source("stack"),
    "part of a source": interleaved(r.Source("stack"), stacked()),
    "turned": r.Permute(stacked(), (0, 2, 1)),
    "multiplied": mx.MatMul(stacked(), r.Slice(r.Source("e0"), 0, 0, WIDTH)),
    "turned on": r.Permute(stacked(), (1, 0, 2)),
    "each expert scaled": r.Scale(stacked(), r.Literal((1.0, 2.0, 3.0), (EXPERTS,))),
    "other rows": r.Reshape(r.Source("stack"), (2, EXPERTS * OUT // 2, WIDTH)),
    "matrix": r.Source("e0"),
    "vector": r.Source("row"),
}


@pytest.mark.parametrize("name", [*FINE, *WHOLE])
@pytest.mark.parametrize("elements", [1, 2 * WIDTH, 1000])
def test_streamed_blocks_equal_the_full_tensor(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(base, "BLOCK_ELEMENTS", elements)
    recipe = (FINE | WHOLE)[name]
    blocks = list(streams.stream_rows(recipe, ARCHIVE))
    found = np.concatenate([b.reshape(-1) for b in blocks])
    np.testing.assert_array_equal(found, recipe.evaluate(ARCHIVE).reshape(-1))
    if name in FINE:
        assert max(b.size for b in blocks) <= max(elements, 2 * WIDTH)


@pytest.mark.parametrize("name", FINE)
def test_selected_rows_equal_rows_of_the_full_tensor(name: str) -> None:
    recipe = FINE[name]
    whole = recipe.evaluate(ARCHIVE)
    for i, expected in enumerate(whole):
        part = streams.select_row(recipe, ARCHIVE, i)
        if name == "four axes":
            assert part is not None
        if part is not None:
            assert part.shape(ARCHIVE) == expected.shape
            np.testing.assert_array_equal(part.evaluate(ARCHIVE), expected)


def test_streams_read_every_source_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BLOCK_ELEMENTS", 2 * WIDTH)
    monkeypatch.setattr(base, "BLOCK_ELEMENTS", 2 * WIDTH)
    read = 0

    class Counting(MemoryReader):
        def read(self, key: str, start: int, stop: int) -> np.ndarray:
            nonlocal read
            read += (stop - start) * WIDTH
            return super().read(key, start, stop)

    list(streams.stream_rows(interleaved(stacked(), stacked(EXPERTS)), Counting(EACH)))
    assert read == 2 * EXPERTS * OUT * WIDTH
