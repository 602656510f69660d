"""Expert offloading for mixtures with more experts than the device holds (Eliseev and Mazur 2023, arXiv 2312.17238).

The weights of all experts stay on the host; the most recently used ones are also on the device. On a GPU they are
copied to slots from pinned memory, or from the mapped files if pinned memory would be too large. On a CPU the device is
main memory: pages of the mapped files, which are released on eviction. While one mixture is computed, the router of the
next one is run on the same tokens, and the experts that it chooses are prefetched. Only the function `moe` of the
generated module is replaced.
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

MAX_PREFETCH_TOKENS = 64  # prefetch experts up to this many tokens; more tokens use nearly all experts
MAX_PINNED_SHARE = 0.5  # share of the host's available memory that pinned weights may take


class ExpertStore(ABC):
    """An LRU cache of a mixture's experts, at most `most` on the device; `stacks`: their weights [experts, ...]."""

    def __init__(self, stacks: Sequence[Tensor], most: int) -> None:
        self.stacks, self.count = stacks, len(stacks[0])
        self.most = min(most, self.count)
        self.bytes = sum(stack[0].nbytes for stack in stacks)  # of one expert
        self.slot_of: OrderedDict[int, int] = OrderedDict()  # expert -> slot, the most recently used at the end
        self.prefetched: set[int] = set()  # prefetched by a guess and not used since

    def load_experts(self, experts: Collection[int], guess: bool = False) -> ExpertCounts:
        """Begin to load `experts` (at most `most`) to the device, evicting the least recently used; return the counts
        of this call. A prefetch (`guess`) counts only the bytes copied."""
        missing = [expert for expert in experts if expert not in self.slot_of]
        for expert in (present for present in experts if present in self.slot_of):
            self.slot_of.move_to_end(expert)
        for expert in missing:
            slot = len(self.slot_of)
            if slot == self.most:
                old, slot = self.slot_of.popitem(last=False)
                self.prefetched.discard(old)
                self.evict_expert(old)
            self.slot_of[expert] = slot
            self.fetch_expert(expert, slot)
        moved = len(missing) * self.bytes
        if guess:
            self.prefetched.update(missing)
            return ExpertCounts(bytes=moved)
        right = self.prefetched.intersection(experts)
        self.prefetched -= right
        return ExpertCounts(len(experts), len(experts) - len(missing), len(right), moved)

    @abstractmethod
    def fetch_expert(self, expert: int, slot: int) -> None:
        """Begin to load the expert with index `expert` into slot `slot` of the device."""

    def evict_expert(self, expert: int) -> None:  # noqa: B027 - a slot is written over
        """Release the device memory of the expert with index `expert`."""

    def wait_for_experts(self, experts: Collection[int]) -> None:  # noqa: B027 - pages come when they are read
        """Make later computations on the device wait until `experts` are loaded, which `load_experts` began."""

    @abstractmethod
    def get_index(self, expert: int) -> int:
        """Return the index of a loaded expert along axis 0 of the module's weights."""


class PagedExperts(ExpertStore):
    """Experts whose weights are mapped from files: the operating system loads pages on access, or earlier on advice."""

    def fetch_expert(self, expert: int, slot: int) -> None:
        self._advise(expert, mmap.MADV_WILLNEED)

    def evict_expert(self, expert: int) -> None:
        self._advise(expert, mmap.MADV_DONTNEED)

    def get_index(self, expert: int) -> int:
        return expert

    def _advise(self, expert: int, advice: int) -> None:
        for weight in (stack[expert] for stack in self.stacks):
            # Only pages without weights of other experts.
            first = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > first:
                _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


class CopiedExperts(ExpertStore):
    """Experts that are copied to a device: `stacks` are on the host, `slots` [most, ...] on the device. `stream` is the
    `CopyStream` that copies them."""

    def __init__(self, stacks: Sequence[Tensor], most: int, device: torch.device, stream: Any) -> None:
        super().__init__(stacks, most)
        self.slots = [torch.empty(self.most, *s.shape[1:], dtype=s.dtype, device=device) for s in stacks]
        self.stream, self._copy_events = stream, dict[int, Any]()

    def fetch_expert(self, expert: int, slot: int) -> None:
        pairs = zip(self.slots, self.stacks, strict=True)
        self._copy_events[expert] = self.stream.copy([(there[slot], here[expert]) for there, here in pairs])

    def evict_expert(self, expert: int) -> None:
        self._copy_events.pop(expert, None)

    def wait_for_experts(self, experts: Collection[int]) -> None:
        for expert in experts:
            if (mark := self._copy_events.pop(expert, None)) is not None:
                self.stream.wait(mark)

    def get_index(self, expert: int) -> int:
        return self.slot_of[expert]


class CopyStream:
    """A CUDA stream for copies that overlap computation."""

    def __init__(self, device: torch.device) -> None:
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as torch has it

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Queue a copy from the second to the first tensor of each pair, after the work queued so far; return a CUDA
        event that completes with the copies."""
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
            return self._side.record_event()

    def wait(self, mark: Any) -> None:
        """Make later computations wait for the event `mark`, which `copy` returned."""
        torch.cuda.current_stream(self._side.device).wait_event(mark)


class Mixture:
    """A mixture of experts: its experts (`store`), the weight [experts, dim] of its `router` (None: not found), and the
    `next` mixture of the model (None: it is the last)."""

    def __init__(self, store: ExpertStore, router: Tensor | None) -> None:
        self.store, self.router = store, router
        self.next: Mixture | None = None

    def select_experts(self, x: Tensor, combine: Tensor, k: int) -> tuple[list[int], list[int]]:
        """Return two sorted lists of experts: those with a nonzero weight in `combine` [tokens, experts], and those
        that the router of the next mixture would choose for `x` [tokens, dim], `k` per token. The second list is empty
        for more than MAX_PREFETCH_TOKENS tokens and without a next router."""
        used = [combine.ne(0).any(0)]
        if self.next is not None and self.next.router is not None and len(x) <= MAX_PREFETCH_TOKENS:
            logits = F.linear(x, self.next.router)
            chosen = logits.topk(min(k, logits.shape[1])).indices
            used.append(torch.zeros_like(logits[0], dtype=torch.bool).index_fill(0, chosen.flatten(), True))
        flags = torch.cat(used).tolist()  # the only synchronization with the device
        experts = [i for i, flag in enumerate(flags[: combine.shape[1]]) if flag]
        return experts, [i for i, flag in enumerate(flags[combine.shape[1] :]) if flag]


class ExpertOffload:
    """The mixtures of a model with offloaded experts.

    - mixtures: dict from the `id` of each weight of a mixture to the mixture, in the order of the model
    - full_moe: the function `moe` of the generated module, which needs all experts on the device
    - counts: the experts used and the bytes copied so far
    """

    def __init__(self, mixtures: dict[int, Mixture], full_moe: Callable[..., Tensor]) -> None:
        self.mixtures, self.full_moe = mixtures, full_moe
        self.counts = ExpertCounts()
        for mixture, following in pairwise(dict.fromkeys(mixtures.values())):
            mixture.next = following

    def moe(self, x: Tensor, combine: Tensor, k: int, expert: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
        """Compute `moe` of the module with these arguments. Load the experts that `combine` [..., experts] uses for `x`
        [..., dim], and prefetch experts of the next mixture. If experts are copied to slots and all in use fit, they
        are computed together, else one after the other."""
        if (mixture := self.mixtures.get(id(stacks[0]))) is None:  # another model of the same code
            return self.full_moe(x, combine, k, expert, *stacks)
        rows, combine, store = x.reshape(-1, x.shape[-1]), combine.reshape(-1, combine.shape[-1]), mixture.store
        asked, guess = mixture.select_experts(rows, combine, k)
        together = isinstance(store, CopiedExperts) and len(asked) <= store.most
        if together:
            self.counts += store.load_experts(asked)
        if mixture.next is not None and len(guess) <= mixture.next.store.most:
            self.counts += mixture.next.store.load_experts(guess, guess=True)
        if isinstance(store, CopiedExperts) and together:
            store.wait_for_experts(asked)
            owners = {slot: owner for owner, slot in store.slot_of.items()}
            columns = torch.tensor([owners.get(slot, -1) for slot in range(store.most)], device=x.device)
            # An empty slot, or one whose expert is not used, gets weight 0.
            share = F.pad(combine, (0, 1))[:, columns]
            return self.full_moe(x, share.view(*x.shape[:-1], -1), k, expert, *stacks)
        y = torch.zeros_like(rows, dtype=torch.promote_types(x.dtype, torch.float32))
        for index in asked:
            self.counts += store.load_experts([index])
            store.wait_for_experts([index])
            token = combine[:, index].nonzero().squeeze(1)
            output = expert(F.linear, rows[token], *(stack[store.get_index(index)] for stack in stacks))
            y = y.index_add(0, token, combine[token, index, None] * output.to(y.dtype))
        return y.to(x.dtype).reshape(x.shape)


def offload_experts(model: nn.Module, most: int, device: str, name: str, stream: Any = None) -> ExpertOffload:
    """Move `model` to `device`, with at most `most` experts of each mixture; replace the function `moe` of the
    generated module, and return the `ExpertOffload` that loads experts on demand. On a GPU, or with a `stream`, experts
    are copied to slots; otherwise they are pages of the mapped weight files. Raises WeftError that begins with `name`
    if the model has no mixture of experts, or on a CPU if its experts are not in mapped files."""
    place, mixtures = torch.device(device), dict[int, Mixture]()
    modules = [m for m in model.modules() if _runs_experts(m)]
    if not modules:
        raise WeftError(f"{name}: the model has no mixture of experts to offload: leave out experts_on_device")
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    host = {module: [p.data for p in module.parameters(recurse=False)] for module in modules}
    if place.type == "cuda":
        stream, host = stream or CopyStream(place), _pin_weights(host)
        _move_parameters(model, place, {id(p) for m in modules for p in m.parameters(recurse=False)})
    for module in modules:
        stacks, router_module = host[module], parents.get(module, module)
        router = next((p for p in router_module.parameters() if p.shape == (len(stacks[0]), stacks[0].shape[-1])), None)
        if stream is None:
            _check_mapped(stacks, name)
            store: ExpertStore = PagedExperts(stacks, most)
        else:
            store = slots = CopiedExperts(stacks, most, place, stream)
            for (key, _), slot in zip([*module.named_parameters(recurse=False)], slots.slots, strict=True):
                setattr(module, key, nn.Parameter(slot, requires_grad=False))
        mixtures |= dict.fromkeys(map(id, module.parameters(recurse=False)), Mixture(store, router))
    globals_of = type(modules[0]).forward.__globals__
    offloaded = ExpertOffload(mixtures, globals_of["moe"])
    globals_of["moe"] = offloaded.moe
    return offloaded


def _runs_experts(module: nn.Module) -> bool:
    """Return whether `module` is a mixture of experts: its generated code calls `moe`, and it has weights of rank 3."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "moe" in code.co_names and any(p.ndim == 3 for p in module.parameters(recurse=False))


def _pin_weights(host: dict[nn.Module, list[Tensor]]) -> dict[nn.Module, list[Tensor]]:
    """Return copies of the weights in pinned memory, from which asynchronous copies to the device are possible; return
    `host` itself if the copies would take more than MAX_PINNED_SHARE of the available memory."""
    need = sum(stack.nbytes for stacks in host.values() for stack in stacks)
    if need > MAX_PINNED_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"):
        return host
    return {module: [stack.pin_memory() for stack in stacks] for module, stacks in host.items()}


def _move_parameters(model: nn.Module, device: torch.device, excluded: set[int]) -> None:
    """Move all parameters and buffers of `model` to `device`, except parameters whose `id` is in `excluded`."""
    for module in model.modules():
        for key, value in [*module.named_parameters(recurse=False)]:
            if id(value) not in excluded:
                setattr(module, key, nn.Parameter(value.to(device), requires_grad=False))
        for key, buffer in [*module.named_buffers(recurse=False)]:
            module.register_buffer(key, buffer.to(device), key not in module._non_persistent_buffers_set)


_libc: Any = ctypes.CDLL(None) if os.name == "posix" else None


def _check_mapped(stacks: Sequence[Tensor], name: str) -> None:
    """Check that all of `stacks` are mapped from files: other memory cannot be released. Raises WeftError if not."""
    maps = Path("/proc/self/maps")
    if not maps.is_file() or not hasattr(_libc, "madvise"):
        raise WeftError(
            f"{name}: this system cannot release pages of files, as offloading needs: leave out experts_on_device"
        )
    files = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    ranges = [[int(end, 16) for end in f[0].split("-")] for f in files if len(f) == 6 and f[5].startswith("/")]
    for stack in stacks:
        first, end = stack.data_ptr(), stack.data_ptr() + stack.nbytes
        if not any(low <= first and end <= high for low, high in ranges):
            raise WeftError(f"{name}: its experts are not mapped from files, so their memory cannot be released")
