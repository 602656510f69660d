"""Mixtures of more experts than the device holds (Eliseev and Mazur 2023, arXiv 2312.17238).

The weights of all experts stay on the host, and those used last are on the device too. On a GPU they have slots, to
which they are copied from pinned memory, or from the files where that is too large. On a CPU the device is its memory:
pages of the mapped files, which are given back. While a mixture is computed, the router of the next one is asked about
the same tokens, and what it would choose is brought in. The generated module is the same, but for its function `moe`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.ir.errors import WeftError

from ..core.results import ExpertCounts

FEW = 64  # tokens whose next experts are guessed; more ask nearly all of them
SHARE = 0.5  # of the host's memory that pinned weights may take


class Store(ABC):
    """The experts of one mixture: stacks of weights [experts, ...], of which the device holds `most` experts."""

    def __init__(self, stacks: Sequence[Tensor], most: int) -> None:
        self.stacks, self.count = stacks, len(stacks[0])
        self.most = min(most, self.count)
        self.bytes = sum(stack[0].nbytes for stack in stacks)  # of an expert
        self.held: OrderedDict[int, int] = OrderedDict()  # expert -> slot, the one used last at the end
        self.guessed: set[int] = set()  # held because of a guess, and not used since

    def bring(self, experts: Collection[int], guess: bool = False) -> ExpertCounts:
        """Have at most `most` experts on the device, in place of those that were used longest ago: what that takes."""
        missing = [expert for expert in experts if expert not in self.held]
        for expert in (one for one in experts if one in self.held):
            self.held.move_to_end(expert)
        for expert in missing:
            slot = len(self.held)
            if slot == self.most:
                old, slot = self.held.popitem(last=False)
                self.guessed.discard(old)
                self.evict(old)
            self.held[expert] = slot
            self.fetch(expert, slot)
        moved = len(missing) * self.bytes
        if guess:
            self.guessed.update(missing)
            return ExpertCounts(bytes=moved)
        right = self.guessed.intersection(experts)
        self.guessed -= right
        return ExpertCounts(len(experts), len(experts) - len(missing), len(right), moved)

    @abstractmethod
    def fetch(self, expert: int, slot: int) -> None:
        """Begin to bring an expert in."""

    def evict(self, expert: int) -> None:  # noqa: B027 - a slot is written over
        """Give the memory of an expert back."""

    def ready(self, experts: Collection[int]) -> None:  # noqa: B027 - pages come when they are read
        """Let what is computed from now on wait for experts that are held."""

    @abstractmethod
    def place(self, expert: int) -> int:
        """Return where in the module's stacks an expert is that is held."""


class Pages(Store):
    """Weights mapped from files: the operating system reads them, ahead where it is told to."""

    def fetch(self, expert: int, slot: int) -> None:
        self._advise(expert, mmap.MADV_WILLNEED)

    def evict(self, expert: int) -> None:
        self._advise(expert, mmap.MADV_DONTNEED)

    def place(self, expert: int) -> int:
        return expert

    def _advise(self, expert: int, advice: int) -> None:
        """Tell the operating system about the pages that only this expert has."""
        for weight in (stack[expert] for stack in self.stacks):
            first = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > first:
                _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


class Slots(Store):
    """Copies on a device: `stacks` lie on the host, `slots` [most, ...] on the device; `stream` copies."""

    def __init__(self, stacks: Sequence[Tensor], most: int, device: torch.device, stream: Any) -> None:
        super().__init__(stacks, most)
        self.slots = [torch.empty(self.most, *s.shape[1:], dtype=s.dtype, device=device) for s in stacks]
        self.stream, self._arrived = stream, dict[int, Any]()

    def fetch(self, expert: int, slot: int) -> None:
        pairs = zip(self.slots, self.stacks, strict=True)
        self._arrived[expert] = self.stream.copy([(there[slot], here[expert]) for there, here in pairs])

    def evict(self, expert: int) -> None:
        self._arrived.pop(expert, None)

    def ready(self, experts: Collection[int]) -> None:
        for expert in experts:
            if (mark := self._arrived.pop(expert, None)) is not None:
                self.stream.wait(mark)

    def place(self, expert: int) -> int:
        return self.held[expert]


class Stream:
    """A stream of CUDA for copies, beside what is computed."""

    def __init__(self, device: torch.device) -> None:
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as torch has it

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Begin to copy to the first of each pair from the second, behind all that is asked for now: a mark."""
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
            return self._side.record_event()

    def wait(self, mark: Any) -> None:
        """Let what is computed from now on begin behind the copies of a mark."""
        torch.cuda.current_stream(self._side.device).wait_event(mark)


class Mixture:
    """A mixture: its experts, the weight [experts, dim] of its router if that is found, and the `next` mixture."""

    def __init__(self, store: Store, router: Tensor | None) -> None:
        self.store, self.router = store, router
        self.next: Mixture | None = None

    def asked(self, x: Tensor, combine: Tensor, k: int) -> tuple[list[int], list[int]]:
        """The experts that combine [tokens, experts] asks, in order; and those that the next mixture may ask."""
        found = [combine.ne(0).any(0)]
        if self.next is not None and self.next.router is not None and len(x) <= FEW:
            logits = F.linear(x, self.next.router)
            chosen = logits.topk(min(k, logits.shape[1])).indices
            found.append(torch.zeros_like(logits[0], dtype=torch.bool).index_fill(0, chosen.flatten(), True))
        flags = torch.cat(found).tolist()  # waits for the device, once
        experts = [i for i, one in enumerate(flags[: combine.shape[1]]) if one]
        return experts, [i for i, one in enumerate(flags[combine.shape[1] :]) if one]


class Offload:
    """All mixtures of a model, of each of which `most` experts are on the device; `counts` is what that has cost."""

    def __init__(self, mixtures: dict[int, Mixture], whole: Callable[..., Tensor]) -> None:
        self.mixtures, self.whole = mixtures, whole
        self.counts = ExpertCounts()
        listed = [*dict.fromkeys(mixtures.values())]
        for one, behind in pairwise(listed):
            one.next = behind

    def moe(self, x: Tensor, combine: Tensor, k: int, expert: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
        """The same as the module's `moe`, with those experts brought in that are asked.

        On a GPU all at once, where they fit; else expert after expert.
        """
        if (mixture := self.mixtures.get(id(stacks[0]))) is None:  # of another model of the same code
            return self.whole(x, combine, k, expert, *stacks)
        rows, combine, store = x.reshape(-1, x.shape[-1]), combine.reshape(-1, combine.shape[-1]), mixture.store
        asked, guess = mixture.asked(rows, combine, k)
        together = isinstance(store, Slots) and len(asked) <= store.most
        if together:
            self.counts += store.bring(asked)
        if mixture.next is not None and len(guess) <= mixture.next.store.most:
            self.counts += mixture.next.store.bring(guess, guess=True)
        if isinstance(store, Slots) and together:
            store.ready(asked)
            owners = {slot: owner for owner, slot in store.held.items()}
            columns = torch.tensor([owners.get(slot, -1) for slot in range(store.most)], device=x.device)
            # A slot that is empty, or whose expert is not asked, has no weight.
            share = F.pad(combine, (0, 1))[:, columns]
            return self.whole(x, share.view(*x.shape[:-1], -1), k, expert, *stacks)
        y = torch.zeros_like(rows, dtype=torch.promote_types(x.dtype, torch.float32))
        for one in asked:
            self.counts += store.bring([one])
            store.ready([one])
            token = combine[:, one].nonzero().squeeze(1)
            made = expert(F.linear, rows[token], *(stack[store.place(one)] for stack in stacks))
            y = y.index_add(0, token, combine[token, one, None] * made.to(y.dtype))
        return y.to(x.dtype).reshape(x.shape)


def offload(model: nn.Module, most: int, device: str, name: str, stream: Any = None) -> Offload:
    """Bring `model`, whose weights are mapped from files, to `device`, of each mixture `most` experts at a time.

    On a GPU, or where there is a `stream`, experts have slots, else pages.
    Raises WeftError when it has no mixture of experts, or the files cannot be told from other memory.
    """
    place, found = torch.device(device), dict[int, Mixture]()
    modules = [m for m in model.modules() if _runs_experts(m)]
    if not modules:
        raise WeftError(f"{name}: it has no mixture of experts, so no experts can stay off the device")
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    host = {module: [p.data for p in module.parameters(recurse=False)] for module in modules}
    if place.type == "cuda":
        stream, host = stream or Stream(place), _pinned(host)
        _move(model, place, {id(p) for m in modules for p in m.parameters(recurse=False)})
    for module in modules:
        stacks, near = host[module], parents.get(module, module)
        router = next((p for p in near.parameters() if p.shape == (len(stacks[0]), stacks[0].shape[-1])), None)
        if stream is None:
            _check_mapped(stacks, name)
            store: Store = Pages(stacks, most)
        else:
            store = slots = Slots(stacks, most, place, stream)
            for (key, _), slot in zip([*module.named_parameters(recurse=False)], slots.slots, strict=True):
                setattr(module, key, nn.Parameter(slot, requires_grad=False))
        found |= dict.fromkeys(map(id, module.parameters(recurse=False)), Mixture(store, router))
    globals_of = type(modules[0]).forward.__globals__
    made = Offload(found, globals_of["moe"])
    globals_of["moe"] = made.moe
    return made


def _runs_experts(module: nn.Module) -> bool:
    """Return whether a module of generated code calls `moe` with weights of its own."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "moe" in code.co_names and any(p.ndim == 3 for p in module.parameters(recurse=False))


def _pinned(host: dict[nn.Module, list[Tensor]]) -> dict[nn.Module, list[Tensor]]:
    """The same weights in pinned memory, which copies leave by themselves, if the host has room for them."""
    need = sum(stack.nbytes for stacks in host.values() for stack in stacks)
    if need > SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"):
        return host
    return {module: [stack.pin_memory() for stack in stacks] for module, stacks in host.items()}


def _move(model: nn.Module, device: torch.device, held: set[int]) -> None:
    """Bring all parameters and buffers to `device` but those that are `held`."""
    for module in model.modules():
        for key, value in [*module.named_parameters(recurse=False)]:
            if id(value) not in held:
                setattr(module, key, nn.Parameter(value.to(device), requires_grad=False))
        for key, buffer in [*module.named_buffers(recurse=False)]:
            module.register_buffer(key, buffer.to(device), key not in module._non_persistent_buffers_set)


_libc: Any = ctypes.CDLL(None) if os.name == "posix" else None


def _check_mapped(stacks: Sequence[Tensor], name: str) -> None:
    """Raise WeftError unless all of `stacks` lie in mapped files: pages of other memory cannot be given back."""
    maps = Path("/proc/self/maps")
    if not maps.is_file() or not hasattr(_libc, "madvise"):
        raise WeftError(f"{name}: this system does not give pages of files back, so all experts stay in memory")
    files = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    ranges = [[int(end, 16) for end in f[0].split("-")] for f in files if len(f) == 6 and f[5].startswith("/")]
    for stack in stacks:
        first, end = stack.data_ptr(), stack.data_ptr() + stack.nbytes
        if not any(low <= first and end <= high for low, high in ranges):
            raise WeftError(f"{name}: its experts are not mapped from files, so they cannot stay there")
