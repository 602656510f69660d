"""Time every kernel at shapes of real models, next to plain torch, its peers and the limits of the device; sweep its
configurations.

`of_copy` and `of_read` are the bytes of a case over the time, as shares of what copies and reads reach in this run;
`of_product` is the same for its operations and a bf16 product. Results are compared with the reference before timing.
Peers take the arguments of the kernels: operators of torch, modules of transformers.
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
from .limits import Call, Clock, microseconds, repeat_calls
from .pool import Task

CALLS = 32  # of a kernel in one CUDA graph, at least
TOLERANCE = 0.1  # relative error of a peer that computes the same, in bf16
LONG = 2e-3  # seconds: longer calls are timed one by one
DEFAULT = "as it ships"  # the configuration without changes

dynamo: Any = torch._dynamo.config
dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 1000  # peers are compiled for every shape


@cache
def compile_reference(function: Callable[..., Any], tuned: bool) -> Callable[..., Any]:
    """Compile a reference by torch.compile for each shape; `tuned` finds a GEMV for one row, which takes long."""
    settings: dict[str, Any] = {"coordinate_descent_tuning": True} if tuned and torch.cuda.is_available() else {}
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, options=settings)
    return compiled


def linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """Compute the product alone, without the parts fused with it."""
    return F.linear(x, weight)


def sdpa(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """Attend with one token to a whole cache by the backend that torch chooses."""
    return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """Attend by FlashAttention, with the query heads of a KV head as tokens: it then splits the keys."""
    batch, heads, d = q.shape
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q.view(batch, k.shape[1], -1, d), k, v).reshape(batch, heads, d)


@cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """Attend by flex_attention, which has a kernel for one token."""
    y: Tensor = _flex()(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    return y


def latent_sdpa(q: Tensor, cache: Tensor, positions: Tensor, rank: int, *, scale: float, **_: Any) -> Tensor:
    """Compute absorbed latent attention by torch's operator: one KV head, values are a slice of its keys."""
    return F.scaled_dot_product_attention(q[:, None], cache, cache[..., :rank], scale=scale)[:, 0]


def latent_products(q: Tensor, cache: Tensor, positions: Tensor, rank: int, *, scale: float, **_: Any) -> Tensor:
    """Compute absorbed latent attention by two products and a softmax."""
    keys = cache[:, 0]
    return ((q @ keys.mT).float() * scale).softmax(-1).to(q.dtype) @ keys[..., :rank]


def experts(implementation: str, kind: str = "experts") -> Callable[..., Tensor]:
    """Return a peer of `moe_decode`: an implementation of transformers, as it is or "compiled"."""

    def compute(x: Tensor, chosen: Tensor, share: Tensor, up: Tensor, down: Tensor, gate: Any, **_: Any) -> Tensor:
        if not hasattr(gate, "experts"):  # weights are stacked once and cached on `gate`
            from transformers import MixtralConfig
            from transformers.models.mixtral.modeling_mixtral import MixtralExperts

            config = MixtralConfig(hidden_size=x.shape[1], intermediate_size=up.shape[1], num_local_experts=len(up))
            with torch.device("meta"):
                gate.experts = MixtralExperts(config)
            gate.experts.gate_up_proj = torch.nn.Parameter(torch.cat([gate, up], 1), requires_grad=False)
            gate.experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
            gate.compiled = torch.compile(gate.experts, dynamic=False)
        gate.experts.config._experts_implementation = implementation
        y: Tensor = getattr(gate, kind)(x, chosen, share.to(x.dtype))
        return y

    return compute


@cache
def _block_mask(seq: int, window: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    return create_block_mask(sees, None, None, seq, seq, device=device)


def flex_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend in a sliding window by flex_attention and a block mask, which is cached."""
    y: Tensor = _flex()(q, k, v, block_mask=_block_mask(q.shape[2], window, q.device), enable_gqa=True)
    return y


@cache
def _dense_mask(seq: int, window: int, device: torch.device) -> Tensor:
    distance = torch.arange(seq, device=device)[:, None] - torch.arange(seq, device=device)
    return (distance >= 0) & (distance < window)


def sdpa_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend in a sliding window by torch's operator and a dense mask, which is cached."""
    mask = _dense_mask(q.shape[2], window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend without a window by torch's fastest operator: correct only where the window covers the sequence."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def dense(x: Tensor, weight: Any) -> Tensor:
    """Compute the product with weights in the dtype of x, dequantized once and cached on the codes."""
    if not hasattr(weight.packed, "dense"):
        weight.packed.dense = _dequantize(weight, weight.scales, weight.offsets).to(x.dtype)
    return F.linear(x, weight.packed.dense)


def int4(x: Tensor, weight: Any) -> Tensor:
    """Compute the product by torch's operator for weights of 4 bits, as torchao and gpt-fast do; packs them once."""
    packed, scales = weight.packed, weight.scales
    if not hasattr(packed, "tiles"):
        steps = (_dequantize(weight, torch.ones_like(scales, dtype=torch.float32), None) + 8).to(torch.uint8)
        packed.tiles = torch.ops.aten._convert_weight_to_int4pack(steps[:, ::2] << 4 | steps[:, 1::2], 8)
        zeros = torch.zeros_like(scales) if weight.offsets is None else weight.offsets
        packed.scales = torch.stack([scales, zeros], -1).to(torch.bfloat16).contiguous()
    y: Tensor = torch.ops.aten._weight_int4pack_mm(x, packed.tiles, weight.group, packed.scales)
    return y


def _dequantize(weight: Any, scales: Tensor, offsets: Tensor | None) -> Tensor:
    from weft.backends.torch.kernels.shared.quantized_gemv import dequantize

    return dequantize(weight.packed, scales, offsets, bits=weight.bits, width=weight.width)


def ssd_chunked(*args: Any, **sizes: Any) -> Any:
    """Compute Mamba-2 by chunks in plain torch, like models that weft generates without kernels."""
    from weft.backends.torch.lib.state_space import ssd

    return ssd(*args, **sizes)


ATTENTION = (sdpa, sdpa_flash, flex, flex_window, sdpa_window, sdpa_causal, latent_sdpa, latent_products)
PEERS: dict[str, Callable[..., Any] | None] = {
    **{function.__name__: function for function in (*ATTENTION, linear, dense, int4, ssd_chunked)},
    "experts_batched": experts("batched_mm"),
    "experts_grouped": experts("grouped_mm"),
    "experts_eager": experts("eager"),
    "experts_compiled": experts("batched_mm", "compiled"),
    "compiled": None,  # the reference by torch.compile
}


def find_module(name: str) -> ModuleType:
    """Import a kernel file by name, also one that is for prompts or shared by kernels.

    Raises:
        ModuleNotFoundError: if there is none.
    """
    package = "weft.backends.torch.kernels"
    paths = (f"{package}.{folder}.{name}" for folder in ("shared", "prefill"))
    return import_module(next((path for path in paths if find_spec(path) is not None), f"{package}.{name}"))


def find_functions(case: Case) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the launcher of a case and its reference."""
    launcher = getattr(find_module(case.kernel), case.kernel)
    return launcher, partial(launcher, kernel=False)


def relative_error(got: Any, want: Any) -> float:
    """Return ‖got − want‖ / ‖want‖ of the tensors in both, the largest; infinite if any value is not finite."""
    worst = 0.0
    for x, y in zip(_tensors(got), _tensors(want), strict=True):
        x, y = x.double(), y.double()
        worst = max(worst, float((x - y).norm() / y.norm().clamp(min=1e-30)) if x.isfinite().all() else float("inf"))
    return float(f"{worst:.3g}")


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for part in value if part is not None for t in _tensors(part)]


def time_calls(clock: Clock, calls: Sequence[Call], least: float = 2e-3) -> dict[str, Any]:
    """Time a call in microseconds: in a CUDA graph of many, or one by one if it is long or waits for the device."""
    if clock.once(calls[0]) < LONG:
        try:
            return {"us": microseconds(clock.graph(repeat_calls(calls, CALLS if clock.cuda else 1), least))}
        except RuntimeError:  # it cannot be captured
            clock.wait()
    return {"us": microseconds(clock.calls(calls[-1])), "timed": "by itself"}


@torch.no_grad()
def prepare_kernel(args: Namespace, case: Case) -> Callable[[], dict[str, Any]]:
    """Compile the kernel and its peers, compare all with the reference, and return the function that times them."""
    clock = Clock(args.device)
    launcher, reference = find_functions(case)
    draw = partial(case.make_check, args.device)
    want = draw().to_float64().call(reference)
    result: dict[str, Any] = {"relative_error": relative_error(draw().launch(launcher), want), "bytes": case.size}
    sets = clock.rotation(partial(case.make, args.device), case.size)
    peers: dict[str, list[Call]] = {}
    for name in () if args.quick else (*(() if case.small else ("reference",)), *case.peers):
        peer = reference if name == "reference" else PEERS[name] or compile_reference(reference, args.slow)
        try:
            result[name] = {"relative_error": relative_error(draw().call(peer), want)}
            peers[name] = [partial(inputs.call, peer) for inputs in sets]
            peers[name][0]()  # compiles
        except Exception as failure:  # the peer does not support this case: recorded in the result
            result[name] = {"error": f"{type(failure).__name__}: {failure}"[:300]}
            peers.pop(name, None)
    calls = [partial(inputs.launch, launcher) for inputs in sets]
    calls[0]()
    return partial(time_kernel, clock, case, result, calls, peers)


@torch.no_grad()
def time_kernel(
    clock: Clock, case: Case, result: dict[str, Any], calls: Sequence[Call], peers: dict[str, list[Call]]
) -> dict[str, Any]:
    """Add to `result` the times of a kernel and its peers, its rates, and its speedup over the fastest equal peer."""
    result |= time_calls(clock, calls)
    seconds = result["us"]["median"] / 1e6
    if case.size:
        result["gb_per_s"] = round(case.size / seconds / 1e9, 1)
    if case.flops:
        result["tflop_per_s"] = round(case.flops / seconds / 1e12, 1)
    equal = []
    for name, peer_calls in peers.items():
        try:
            result[name] |= time_calls(clock, peer_calls)
        except RuntimeError as failure:
            result[name]["error"] = f"{type(failure).__name__}: {failure}"[:300]
        else:
            equal += [result[name]["us"]["median"]] * (result[name]["relative_error"] < TOLERANCE)
    return result | ({"speedup": round(min(equal) / result["us"]["median"], 3)} if equal else {})


def list_kernels(args: Namespace) -> Iterator[Task]:
    """Yield every case of every kernel."""
    for case in cases(args.device == "cuda"):
        alone = 0.5 * (2 + len(case.peers)) + (4 if case.small else 0)
        seconds = 5 + 6 * len(case.peers) * (1 + 2 * args.slow)
        memory = 3 + 3 * max(case.size, 2 << 27) / 2**30
        yield Task(f"{case.kernel}.{case.name}", partial(prepare_kernel, args, case), seconds, alone, memory)


@contextmanager
def configure(kernel: ModuleType, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Apply the settings of an alternative within the block; yield the keywords among them for the launcher.

    "file.NAME" is a constant of a kernel file, "warps" and "stages" are those of the launch, any other name is a
    keyword of the launcher.
    """
    keywords = dict(settings)
    launch = {name: keywords.pop(name) for name in ("warps", "stages") if name in settings}
    constants = [
        (find_module(name.partition(".")[0]), name.partition(".")[2], name) for name in settings if "." in name
    ]
    values = [(module, name, keywords.pop(key)) for module, name, key in constants]
    if launch:
        options = kernel.options
        values.append((kernel, "options", lambda x, *_, **__: options(x, **launch)))
    before = [(module, name, getattr(module, name)) for module, name, _ in values]
    try:
        for change in values:
            setattr(*change)
        yield keywords
    finally:
        for change in before:
            setattr(*change)


@torch.no_grad()
def prepare_sweep(args: Namespace, case: Case) -> Callable[[], dict[str, Any]]:
    """Compile every combination of the settings of a case, and return the function that times them."""
    launcher, _ = find_functions(case)
    clock, failed = Clock(args.device), dict[str, str]()
    sets = clock.rotation(partial(case.make, args.device), case.size)
    compiled = {}
    for values in [(), *combinations(*case.sweep.values())]:
        settings = dict(zip(case.sweep, values, strict=False))
        label = " ".join(f"{name}={value}" for name, value in settings.items()) or DEFAULT
        try:
            with configure(find_module(case.kernel), settings) as keywords:
                sets[0].launch(launcher, **keywords)
            compiled[label] = settings
        except Exception as failure:  # does not compile or does not fit: recorded in the result
            failed[label] = f"{type(failure).__name__}: {failure}"[:120]

    @torch.no_grad()
    def time_sweep() -> dict[str, Any]:
        times = {}
        for label, settings in compiled.items():
            with configure(find_module(case.kernel), settings) as keywords:
                calls = [partial(inputs.launch, launcher, **keywords) for inputs in sets]
                times[label] = time_calls(clock, calls, 1e-3)["us"]["median"]
        best = min(times, key=lambda label: times[label])
        return {"best": best, "best_us": times[best], "us": times[DEFAULT], "all_us": times, "failed": failed}

    return time_sweep


def list_sweep(args: Namespace) -> Iterator[Task]:
    """Yield every case with alternative settings."""
    for case in cases(args.device == "cuda"):
        if case.sweep:
            count = prod(map(len, case.sweep.values()))
            run, memory = partial(prepare_sweep, args, case), 2 + 3 * max(case.size, 2 << 27) / 2**30
            yield Task(f"{case.kernel}.{case.name}", run, 5 + 1.5 * count, 1 + 0.06 * count, memory)
