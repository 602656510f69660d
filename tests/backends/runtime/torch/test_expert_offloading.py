"""Mixtures whose experts are not all on the device: the same tokens, bounded memory, and copies that are waited for."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import weft
from weft import GatedMLP, MoE, Router
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.core.results import ExpertCounts
from weft.backends.runtime.torch.expert_offloading import CopiedExperts, PagedExperts, offload_experts
from weft.backends.runtime.torch.torch_decoder import TorchDecoder
from weft.frontends.dsl import Decoder

from ....passes.zoo_variants import HIDDEN, feeds
from ....sampling import each

EXPERTS = 8
FEEDS: dict[str, Any] = {
    "Mixtral": MoE(EXPERTS, HIDDEN, 2),
    "shared expert": MoE(EXPERTS, HIDDEN, 3, shared=GatedMLP(5)),
    "biases": MoE(EXPERTS, HIDDEN, 2, bias=True),
    "groups": MoE(EXPERTS, 7, 3, router=Router(scoring="sigmoid", correction=True, groups=4, top_groups=2)),
    "top 1": MoE(EXPERTS, HIDDEN, 1, router=Router(renormalize=False)),
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8], [5, 5, 5, 1], [3]]
TEXT = [*range(1, 12)]


@pytest.fixture(scope="module", params=FEEDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(feeds(FEEDS[request.param]), tmp_path_factory.mktemp("experts") / "out")


def compiled(model: Decoder, out: Path) -> Path:
    weft.compile(model, out, target="torch", seed=7)
    return out


def opened(folder: Path, experts: int | None = None) -> Generator:
    model = weft.load(folder, device="cpu", trust=True, experts_on_device=experts)
    assert isinstance(model, Generator)
    return model


def answers(model: Generator, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [result.tokens for result in model.generate(prompts, max_tokens=9, chunk=3)]


@pytest.mark.halved
@pytest.mark.parametrize("most", each(3, [3, 1, 2, 99, 5, EXPERTS]))
def test_offloaded_experts_give_bit_identical_logits(folder: Path, most: int) -> None:
    """Prompts are read in several chunks, which ask more experts than there is room for."""
    whole, some = opened(folder), opened(folder, most)
    whole.decoder.step = whole.decoder._run_step  # type: ignore[attr-defined]  # decode.py rounds otherwise
    np.testing.assert_array_equal(some.logits(TEXT, chunk=4), whole.logits(TEXT, chunk=4))
    for prompts in (PROMPTS[:1], PROMPTS):
        assert answers(some, prompts) == answers(whole, prompts)


class Late:
    """A stream whose copies are made as late as may be: when they are waited for. Until then slots hold no numbers."""

    def __init__(self) -> None:
        self.copies: list[Sequence[tuple[Tensor, Tensor]]] = []
        self.bytes = 0

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
        for there, _ in pairs:
            there.fill_(torch.nan)
        self.copies.append(pairs)
        return len(self.copies)

    def wait(self, mark: int) -> None:
        for pairs in self.copies[:mark]:
            for there, here in pairs:
                there.copy_(here)
                self.bytes += here.nbytes
        self.copies[:mark] = [[]] * mark


@pytest.mark.parametrize("most", each(2, [1, 3, EXPERTS]))
def test_slots_are_not_read_before_copies_have_ended(folder: Path, most: int) -> None:
    want, model = opened(folder), opened(folder)
    decoder: Any = model.decoder
    assert isinstance(decoder, TorchDecoder)
    stream = Late()
    decoder.offloaded = offload_experts(decoder.model, most, "cpu", "model", stream)
    decoder.step = decoder._run_step
    (whole,) = {p.shape[0] for m in decoder.model.modules() for p in m.parameters(recurse=False) if p.ndim == 3}
    assert whole == most  # the module holds no more
    np.testing.assert_allclose(model.logits(TEXT, chunk=4), want.logits(TEXT, chunk=4), atol=2e-6)
    assert answers(model, PROMPTS) == answers(want, PROMPTS)
    stream.wait(len(stream.copies))
    assert decoder.experts.bytes == stream.bytes > 0


class Recorded(PagedExperts):
    """Pages that are only written down."""

    def __init__(self, experts: int, most: int) -> None:
        super().__init__([torch.zeros(experts, 2, 3), torch.zeros(experts, 2)], most)
        self.events: list[tuple[str, int]] = []

    def fetch_expert(self, expert: int, slot: int) -> None:
        self.events.append(("fetch", expert))

    def evict_expert(self, expert: int) -> None:
        self.events.append(("evict", expert))


def test_least_recently_used_expert_is_evicted() -> None:
    """Against a list of all uses, in which the last use of every expert is looked up."""
    draw, store = random.Random(3), Recorded(9, 4)
    uses: list[int] = []
    there: set[int] = set()
    counts = ExpertCounts()
    for _ in range(300):
        asked = sorted(draw.sample(range(9), draw.randint(1, 4)))
        uses += [expert for expert in asked if expert in there]
        for expert in asked:
            if expert not in there:
                if len(there) == 4:
                    oldest = min(there, key=lambda e: len(uses) - uses[::-1].index(e))
                    there.remove(oldest)
                    assert store.events.count(("evict", oldest)) < store.events.count(("fetch", oldest)) + 1
                there.add(expert)
                uses.append(expert)
        counts += store.load_experts(asked)
        assert {*store.slot_of} == there
        assert sorted(store.slot_of.values()) == [*range(len(there))]
    assert counts.asked - counts.found == sum(what == "fetch" for what, _ in store.events)
    assert counts.bytes == (counts.asked - counts.found) * (6 + 2) * 4


def test_correct_prefetches_are_counted() -> None:
    store = Recorded(6, 3)
    assert store.load_experts([1, 2], guess=True) == ExpertCounts(bytes=64)
    assert store.load_experts([2, 4]) == ExpertCounts(asked=2, found=1, guessed=1, bytes=32)
    assert store.load_experts([2]) == ExpertCounts(asked=1, found=1)
    assert store.load_experts([5, 0]) == ExpertCounts(asked=2, bytes=64)  # 1 goes, which nobody asked


def test_next_mixture_is_prefetched(folder: Path) -> None:
    model = opened(folder, 4)
    counts = model.generate(PROMPTS[:1], max_tokens=20)[0].timings.experts
    assert 0 < counts.guessed <= counts.found < counts.asked


MEMORY = """
import sys
import weft

def resident(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what)) / 1024

experts = int(sys.argv[2]) or None
model = weft.load(sys.argv[1], device="cpu", trust=True, experts_on_device=experts)
model.generate([[1]], max_tokens=2)  # what PyTorch needs once
before = resident("VmRSS")
(result,) = model.generate([[i % 60 for i in range(64)]], max_tokens=16)
print(resident("VmHWM") - before, *result.tokens)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux alone")
def test_memory_stays_bounded(tmp_path: Path, warm: dict[str, str]) -> None:
    """160 MB of experts: all are read in the end, a few at a time."""
    folder = compiled(Decoder(64, 128, 2, feeds(MoE(64, 819, 4)).block, context=128), tmp_path / "out")
    found, script = {}, tmp_path / "memory.py"
    script.write_text(MEMORY)
    for experts in (0, 2):
        done = subprocess.run(
            [warm["PYTHON_EXEC"], script, folder, str(experts)], env=warm, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        megabytes, *made = done.stdout.split()
        found[experts] = float(megabytes), made
    assert found[0][1] == found[2][1]
    assert found[2][0] < 40 < 100 < found[0][0], found


def test_impossible_offloading_is_refused(tmp_path: Path) -> None:
    dense, mixed = feeds(GatedMLP(HIDDEN)), feeds(FEEDS["Mixtral"])
    folder = compiled(dense, tmp_path / "dense")
    with pytest.raises(weft.WeftError, match="dense: the model has no mixture of experts to offload"):
        opened(folder, 2)
    with pytest.raises(weft.WeftError, match="experts_on_device is 0, but it must be a whole number of at least 1"):
        opened(folder, 0)
    weft.compile(mixed, tmp_path / "onnx", target="ort-cpu", seed=7)
    with pytest.raises(weft.WeftError, match="compiled for ort-cpu, which keeps all experts on the device: to keep on"):
        opened(tmp_path / "onnx", 2)
    mapped = opened(compiled(mixed, tmp_path / "mixed")).decoder
    assert isinstance(mapped, TorchDecoder)
    with pytest.raises(
        weft.WeftError, match="its experts are not mapped from files, so their memory cannot be released"
    ):
        offload_experts(mapped.model.double(), 2, "cpu", "model")


def test_expert_stores_are_no_larger_than_the_experts() -> None:
    stacks = [torch.zeros(3, 4, 2)]
    store = CopiedExperts(stacks, 7, torch.device("cpu"), Late())
    assert store.most == 3 and store.slots[0].shape == (3, 4, 2)
    asked: Collection[int] = [0, 1, 2]
    assert store.load_experts(asked).bytes == stacks[0].nbytes
