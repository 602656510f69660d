"""Every kernel at shapes of real models: its time, beside plain torch, its peers, and what the card allows.

A case says which bytes must move and how many operations there are. `of_copy` and `of_read` are those bytes over the
time, divided by what copying and reading reach in this run, `of_product` the operations by what a bf16 product reaches.
Before it is timed, a kernel's result is compared with its reference's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product as combinations
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .kernel_cases import Case, cases
from .limits import Call, Clock, cycled, microseconds
from .pool import Work

CALLS = 32  # of a kernel in one CUDA graph, at least
SAME = 0.1  # relative error of what computes the same, in bf16
LONG = 2e-3  # seconds: what takes longer is timed by itself


def module(name: str) -> ModuleType:
    """A kernel file, one for prompts, or one that kernels share, by name.

    Raises:
        ModuleNotFoundError: there is none.
    """
    package = "weft.backends.torch.kernels"
    places = (f"{package}.{room}.{name}" for room in ("shared", "prompt"))
    return import_module(next((place for place in places if find_spec(place) is not None), f"{package}.{name}"))


def functions(case: Case) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The launcher of a case and its reference."""
    kernel = module(case.kernel)
    return getattr(kernel, case.kernel), kernel.reference


def error(got: Any, want: Any) -> float:
    """‖got − want‖ / ‖want‖ of the tensors in both, the worst; infinite if anything is not finite."""
    pairs = zip(_tensors(got), _tensors(want), strict=True)
    worst = 0.0
    for x, y in pairs:
        x, y = x.double(), y.double()
        worst = max(worst, float((x - y).norm() / y.norm().clamp(min=1e-30)) if x.isfinite().all() else float("inf"))
    return worst


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [t for part in found if part is not None for t in _tensors(part)]


def timed(clock: Clock, calls: Sequence[Call], least: float = 2e-3) -> dict[str, Any]:
    """Microseconds of a call: in a CUDA graph of many, or by itself where it is long or waits for the device."""
    if clock.once(calls[0]) < LONG:
        try:
            return {"us": microseconds(clock.graph(cycled(calls, CALLS if clock.cuda else 1), least))}
        except RuntimeError:  # it cannot be captured
            clock.wait()
    return {"us": microseconds(clock.calls(calls[-1])), "timed": "by itself"}


@torch.no_grad()
def prepare_kernel(args: Namespace, case: Case) -> Callable[[], dict[str, Any]]:
    """Compile the kernel and its peers, compare all with the reference, and return what times them."""
    clock = Clock(args.device)
    launcher, reference = functions(case)
    fresh = partial(case.checked, args.device)
    want = fresh().wide().call(reference)
    found: dict[str, Any] = {"relative_error": _rounded(error(fresh().launch(launcher), want)), "bytes": case.size}
    sets = clock.rotation(partial(case.make, args.device), case.size)
    contenders: dict[str, list[Call]] = {}
    for name in () if args.quick else (*(() if case.small else ("reference",)), *case.rivals):
        other = reference if name == "reference" else rival(name, reference, tuned=args.slow)
        try:
            found[name] = {"relative_error": _rounded(error(fresh().call(other), want))}
            contenders[name] = [partial(inputs.call, other) for inputs in sets]
            contenders[name][0]()  # compiles
        except Exception as failure:  # a peer that has nothing for this case: said in the result
            found[name] = {"error": f"{type(failure).__name__}: {failure}"[:300]}
            contenders.pop(name, None)
    own = [partial(inputs.launch, launcher) for inputs in sets]
    own[0]()
    del want
    return partial(_timed_beside, clock, case, found, own, contenders)


@torch.no_grad()
def _timed_beside(
    clock: Clock, case: Case, found: dict[str, Any], own: Sequence[Call], contenders: dict[str, list[Call]]
) -> dict[str, Any]:
    found |= timed(clock, own)
    seconds = found["us"]["median"] / 1e6
    if case.size:
        found["gb_per_s"] = round(case.size / seconds / 1e9, 1)
    if case.flops:
        found["tflop_per_s"] = round(case.flops / seconds / 1e12, 1)
    best = []
    for name, calls in contenders.items():
        try:
            found[name] |= timed(clock, calls)
        except RuntimeError as failure:
            found[name]["error"] = f"{type(failure).__name__}: {failure}"[:300]
        else:
            best += [found[name]["us"]["median"]] * (found[name]["relative_error"] < SAME)
    return found | ({"speedup": round(min(best) / found["us"]["median"], 3)} if best else {})


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def list_kernels(args: Namespace) -> Iterator[Work]:
    """Every case of every kernel."""
    for case in cases(args.device == "cuda"):
        alone = 0.5 * (2 + len(case.rivals)) + (4 if case.small else 0)
        seconds = 5 + 6 * len(case.rivals) * (1 + 2 * args.slow)
        memory = 3 + 3 * max(case.size, 2 << 27) / 2**30
        yield Work(f"{case.kernel}.{case.name}", partial(prepare_kernel, args, case), seconds, alone, memory)


dynamo: Any = torch._dynamo.config
dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 1000  # a peer is compiled anew for every shape


@cache
def compiled(function: Callable[..., Any], tuned: bool) -> Callable[..., Any]:
    """torch.compile of a reference, each shape by itself; `tuned` as makes it a GEMV at one row, which takes long."""
    settings: dict[str, Any] = {"coordinate_descent_tuning": True} if tuned and torch.cuda.is_available() else {}
    found: Callable[..., Any] = torch.compile(function, dynamic=False, options=settings)
    return found


def linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """The product alone, without what is fused with it."""
    return F.linear(x, weight)


def sdpa(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """One token over a whole cache by torch's own choice."""
    return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """The same by FlashAttention, whose query heads of a KV head become tokens: it then splits the keys."""
    batch, heads, d = q.shape
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q.view(batch, k.shape[1], -1, d), k, v).reshape(batch, heads, d)


@cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """The same by flex_attention, which has a kernel of its own for one token."""
    found: Tensor = _flex()(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    return found


def latent_sdpa(q: Tensor, cache: Tensor, positions: Tensor, rank: int, *, scale: float, **_: Any) -> Tensor:
    """Absorbed latent attention by torch's operator: one KV head, values a slice of its keys."""
    y = F.scaled_dot_product_attention(q[:, None], cache, cache[..., :rank], scale=scale)
    return y[:, 0]


def latent_products(q: Tensor, cache: Tensor, positions: Tensor, rank: int, *, scale: float, **_: Any) -> Tensor:
    """The same as two products and a softmax."""
    keys = cache[:, 0]
    return ((q @ keys.mT).float() * scale).softmax(-1).to(q.dtype) @ keys[..., :rank]


def _experts(x: Tensor, up: Tensor, down: Tensor, gate: Any) -> Any:
    """transformers' experts on weights that are stacked once and kept with `gate`."""
    if not hasattr(gate, "experts"):
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = MixtralConfig(hidden_size=x.shape[1], intermediate_size=up.shape[1], num_local_experts=len(up))
        with torch.device("meta"):
            experts = MixtralExperts(config)
        experts.gate_up_proj = torch.nn.Parameter(torch.cat([gate, up], 1), requires_grad=False)
        experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
        gate.experts, gate.compiled = experts, torch.compile(experts, dynamic=False)
    return gate


def experts(way: str, kind: str = "experts") -> Callable[..., Tensor]:
    """A way of transformers as a peer of `moe_decode`, as it is or compiled."""

    def compute(x: Tensor, chosen: Tensor, share: Tensor, up: Tensor, down: Tensor, gate: Tensor, **_: Any) -> Tensor:
        kept = _experts(x, up, down, gate)
        kept.experts.config._experts_implementation = way
        found: Tensor = getattr(kept, kind)(x, chosen, share.to(x.dtype))
        return found

    return compute


@cache
def _window(seq: int, window: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    return create_block_mask(sees, None, None, seq, seq, device=device)


def flex_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """A sliding window by flex_attention and a mask of blocks, which is made once."""
    found: Tensor = _flex()(q, k, v, block_mask=_window(q.shape[2], window, q.device), enable_gqa=True)
    return found


@cache
def _dense_window(seq: int, window: int, device: torch.device) -> Tensor:
    distance = torch.arange(seq, device=device)[:, None] - torch.arange(seq, device=device)
    return (distance >= 0) & (distance < window)


def sdpa_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """A sliding window by torch's operator and a mask of all pairs, which is made once."""
    mask = _dense_window(q.shape[2], window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """No window at all, by torch's fastest operator: right only where the window holds the text."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def dense(x: Tensor, weight: Any) -> Tensor:
    """The same product with weights of the dtype of x, made once and kept with the codes."""
    if not hasattr(weight.packed, "dense"):
        weight.packed.dense = _widened(weight, weight.scales, weight.offsets).to(x.dtype)
    return F.linear(x, weight.packed.dense)


def int4(x: Tensor, weight: Any) -> Tensor:
    """torch's own product with weights of 4 bits, which torchao and gpt-fast use, on weights packed once its way."""
    kept, scales = weight.packed, weight.scales
    if not hasattr(kept, "tiles"):
        steps = (_widened(weight, torch.ones_like(scales, dtype=torch.float32), None) + 8).to(torch.uint8)
        kept.tiles = torch.ops.aten._convert_weight_to_int4pack(steps[:, ::2] << 4 | steps[:, 1::2], 8)
        zeros = torch.zeros_like(scales) if weight.offsets is None else weight.offsets
        kept.scales = torch.stack([scales, zeros], -1).to(torch.bfloat16).contiguous()
    found: Tensor = torch.ops.aten._weight_int4pack_mm(x, kept.tiles, weight.group, kept.scales)
    return found


def _widened(weight: Any, scales: Tensor, offsets: Tensor | None) -> Tensor:
    from weft.backends.torch.kernels.shared.codes import dequantize

    return dequantize(weight.packed, scales, offsets, bits=weight.bits, width=weight.width)


def ssd_chunked(*args: Any, **sizes: Any) -> Any:
    """Mamba-2 by chunks in plain torch, as models that weft generates compute it without kernels."""
    from weft.backends.torch.snippets.state_space import ssd

    return ssd(*args, **sizes)


RIVALS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "flex_window": flex_window,
    "sdpa_window": sdpa_window,
    "sdpa_causal": sdpa_causal,
    "dense": dense,
    "int4": int4,
    "experts_batched": experts("batched_mm"),
    "experts_grouped": experts("grouped_mm"),
    "experts_eager": experts("eager"),
    "experts_compiled": experts("batched_mm", "compiled"),
    "latent_sdpa": latent_sdpa,
    "latent_products": latent_products,
    "ssd_chunked": ssd_chunked,
    "sdpa": sdpa,
    "sdpa_flash": sdpa_flash,
    "flex": flex,
}


def rival(name: str, reference: Callable[..., Any], tuned: bool) -> Callable[..., Any]:
    """A peer by name; "compiled" is the reference through torch.compile."""
    return partial(compiled(reference, tuned)) if name == "compiled" else RIVALS[name]


SHIPPED = "as it ships"


@contextmanager
def configured(kernel: ModuleType, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The launcher's keywords of an alternative, while its other settings hold.

    "file.NAME" is a constant of a kernel file, "warps" and "stages" are those of the launch, any other name is a
    keyword of the launcher.
    """
    keywords, undo = {}, list[Callable[[], None]]()
    launch = {name: settings[name] for name in ("warps", "stages") if name in settings}

    def put(where: ModuleType, name: str, value: Any) -> None:
        undo.append(partial(setattr, where, name, getattr(where, name)))
        setattr(where, name, value)

    for name, value in settings.items():
        if "." in name:
            file, _, constant = name.partition(".")
            put(module(file), constant, value)
        elif name not in launch:
            keywords[name] = value
    if launch:
        options = kernel.options
        put(kernel, "options", lambda x, *_, **__: options(x, **launch))
    try:
        yield keywords
    finally:
        for back in reversed(undo):
            back()


@torch.no_grad()
def prepare_sweep(args: Namespace, case: Case) -> Callable[[], dict[str, Any]]:
    """Compile every combination of the settings that a case offers, and return what times them."""
    launcher, _ = functions(case)
    clock, failed = Clock(args.device), dict[str, str]()
    sets = clock.rotation(partial(case.make, args.device), case.size)
    tried = {}
    for values in [(), *combinations(*case.sweep.values())]:
        settings = dict(zip(case.sweep, values, strict=False))
        label = " ".join(f"{name}={value}" for name, value in settings.items()) or SHIPPED
        try:
            with configured(module(case.kernel), settings) as keywords:
                sets[0].launch(launcher, **keywords)
            tried[label] = settings
        except Exception as failure:  # does not compile, or does not fit: said in the result
            failed[label] = f"{type(failure).__name__}: {failure}"[:120]

    @torch.no_grad()
    def measured() -> dict[str, Any]:
        times = {}
        for label, settings in tried.items():
            with configured(module(case.kernel), settings) as keywords:
                calls = [partial(inputs.launch, launcher, **keywords) for inputs in sets]
                times[label] = timed(clock, calls, 1e-3)["us"]["median"]
        best = min(times, key=lambda label: times[label])
        return {"best": best, "best_us": times[best], "us": times[SHIPPED], "all_us": times, "failed": failed}

    return measured


def list_sweep(args: Namespace) -> Iterator[Work]:
    """Every case that has alternatives."""
    for case in cases(args.device == "cuda"):
        if case.sweep:
            count = prod(map(len, case.sweep.values()))
            memory = 2 + 3 * max(case.size, 2 << 27) / 2**30
            name = f"{case.kernel}.{case.name}"
            yield Work(name, partial(prepare_sweep, args, case), 5 + 1.5 * count, 1 + 0.06 * count, memory)
