"""Launches of a decode step on a GPU: on meta tensors, where nothing is computed, and nothing can be waited for."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft import (
    MLA,
    ALiBi,
    GatedDeltaNet,
    GatedMLP,
    LayerNorm,
    LightningAttention,
    Mamba,
    Mamba2,
    MoE,
    RMSNorm,
    RoPE,
    Router,
)
from weft.backends.runtime.core.sampler import Sampling
from weft.backends.runtime.torch.sampling_context import DeviceSampler
from weft.backends.torch.decode.step_source import LAUNCHERS
from weft.backends.torch.kernels.shared import launch
from weft.frontends.dsl import Decoder

from ...lowered import build_module, build_step
from ...passes.zoo_variants import BIASED, HIDDEN, attends, decoder, feeds
from ...sampling import each

LATENT = MLA(3, 9, 5, 4, 7, RoPE(interleaved=True))
MODELS: dict[str, tuple[Decoder, int]] = {  # and what a layer launches at most
    "dense": (attends(), 5),
    "norms of q and k": (attends(qk_norm=RMSNorm()), 5),
    "biases, layer norm": (decoder(attends(**BIASED).block.attn, GatedMLP(HIDDEN, bias=True), norm=LayerNorm()), 5),
    "window, sinks": (attends(window=3, keep_first=1, sinks=True), 5),
    "ALiBi": (attends(rope=None, bias=ALiBi()), 5),
    "experts": (feeds(MoE(8, HIDDEN, 2)), 6),
    "experts in groups": (
        feeds(MoE(6, 7, 3, router=Router(scoring="sigmoid", correction=True, groups=3, top_groups=2))),
        6,
    ),
    "shared expert": (feeds(MoE(8, HIDDEN, 2, shared=GatedMLP(5))), 8),
    "latent": (decoder(LATENT, GatedMLP(HIDDEN)), 7),  # five of them the attention's
    "Mamba": (decoder(Mamba(21, 5), None), 5),
    "Mamba-2": (decoder(Mamba2(24, 4, 5, groups=2), None), 4),
    "delta rule": (decoder(GatedDeltaNet(4, 3, 5, groups=2, negative=True), None), 6),
    "delta rule by key": (decoder(GatedDeltaNet(3, 5, gate="sigmoid", per_key=True, rank=7), None), 7),
    "lightning attention": (decoder(LightningAttention(3), None), 6),
}
OUTSIDE = 2  # embeddings with angles, and the head


def launched(func: Any, args: Any, out: Any) -> bool:
    """Return whether an operator of torch launches a kernel: it writes, and what it gives back is no view."""
    name = func.overloadpacket.__name__
    if name.startswith(("empty", "new_empty")):
        return False
    held = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
    made = {t.untyped_storage()._cdata for t in tree_leaves(out) if isinstance(t, Tensor)}
    return name.endswith("_") or not made <= held


class Launches(TorchDispatchMode):
    """Counts what torch and the kernels launch while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found[str(func)] += launched(func, args, out)
        return out


class Recorded:
    """A kernel that is counted and not run."""

    def __init__(self, name: str, launches: Launches) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launch

    def launch(self, *_: Any, **__: Any) -> None:
        self.launches.found[self.name] += 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counting = Launches()
    monkeypatch.setattr(launch, "INTERPRETED", True)  # kernels are taken
    more = ("choose_tokens", "moe_grouped", "shared.split_keys", "prefill.norm_rope_cache", "prefill.gated_activation")
    for name in (*LAUNCHERS, *more):
        file = importlib.import_module(f"weft.backends.torch.kernels.{name}")
        for attribute, value in vars(file).copy().items():
            if attribute.endswith("_kernel") and hasattr(value, "arg_names"):
                monkeypatch.setattr(file, attribute, Recorded(attribute, counting))
    return counting


def counted(launches: Launches, model: Decoder, batch: int, seq: int = 1) -> Counter[str]:
    """Count what the second step of `model` launches, of `seq` tokens of each row; the first makes what is kept."""
    graph = model.graph()
    module: Any = build_module(graph).to("meta", torch.bfloat16).eval()
    step, cache = build_step(graph, module), module.new_cache(batch, 2 * seq + 16)
    assert step is not None
    ids, positions = torch.zeros(2, batch, seq, dtype=torch.int64, device="meta").unbind()
    with torch.inference_mode():
        step(ids, positions, cache)
        launches.found.clear()
        with launches:
            step(ids, positions, cache)
    return +launches.found


@pytest.mark.halved
@pytest.mark.parametrize(("name", "batch"), each(2, itertools.product(MODELS, (1, 8, 64))))
def test_decode_step_has_few_launches_and_no_synchronization(launches: Launches, name: str, batch: int) -> None:
    """Meta tensors have no values, so a step that asks for one would raise."""
    model, most = MODELS[name]
    one, two = (counted(launches, replace(model, layers=layers), batch) for layers in (1, 2))
    layer = two - one
    assert sum(layer.values()) <= most, layer
    assert sum((one - layer).values()) <= OUTSIDE, one - layer
    assert all(found.endswith("_kernel") for found in two), two


@pytest.mark.parametrize(("seq", "most"), [(5, 6), (100, 9)])
def test_prompt_has_few_launches_and_no_synchronization(launches: Launches, seq: int, most: int) -> None:
    """Few tokens by the kernels of a step and an operator for attention; of many, libraries compute norms and products,
    and kernels what stands beside them."""
    one, two = (counted(launches, replace(MODELS["dense"][0], layers=layers), 1, seq) for layers in (1, 2))
    layer = two - one
    for name in ("aten.arange.default", "aten.ge.Tensor", "aten.flatten.using_ints"):  # flash attention has no need
        layer.pop(name, None)
    assert sum(layer.values()) <= most, layer


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(
    ("way", "most"), [({}, 1), ({"temperature": 0.7}, 1), ({"temperature": 0.7, "top_k": 50, "top_p": 0.9}, 2)]
)
def test_choosing_tokens_adds_few_launches(launches: Launches, way: Any, most: int, batch: int) -> None:
    """It also begins the next step, which no operator of torch does."""
    device = torch.device("meta")
    draws = DeviceSampler(Sampling(**way), batch, 16, device)
    logits = torch.zeros(batch, 5000, dtype=torch.bfloat16, device=device)
    begun = (*torch.zeros(2, batch, 1, dtype=torch.int64, device=device), logits[:, :1] > 0)
    draws(logits, begun)
    launches.found.clear()
    with launches:
        draws(logits, begun)
    found = +launches.found
    assert sum(found.values()) <= most and all(name.endswith("_kernel") for name in found), found
