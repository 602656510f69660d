"""What a decode step launches on a GPU: on meta tensors, where nothing is computed and nothing can be waited for."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft import MLA, GatedMLP, Mamba2, MoE, RMSNorm, RoPE
from weft.backends.torch.decode.source import LAUNCHERS
from weft.backends.torch.kernels.shared import launch
from weft.backends.torch.package.module import build_module, build_step
from weft.frontends.dsl import Decoder

from ...passes.zoo_variants import HIDDEN, attends, decoder, feeds

# No launches: views, and memory that nothing is written to.
FREE = ("view", "reshape", "slice", "select", "unsqueeze", "squeeze", "expand", "t.", "transpose", "permute", "split")
FREE += ("detach", "alias", "empty", "unbind", "as_strided", "lift_fresh")


class Launches(TorchDispatchMode):
    """Counts what torch and the kernels launch while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not name.startswith(FREE):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Recorded:
    """A kernel that is counted and not run."""

    def __init__(self, name: str, launches: Launches) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launched

    def launched(self, *_: Any, **__: Any) -> None:
        self.launches.found[self.name] += 1


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    counting = Launches()
    monkeypatch.setattr(launch, "INTERPRETED", True)
    for name in (*LAUNCHERS, "moe_grouped", "shared.split_keys"):
        file = importlib.import_module(f"weft.backends.torch.kernels.{name}")
        for attribute, value in vars(file).copy().items():
            if attribute.endswith("_kernel") and hasattr(value, "arg_names"):
                monkeypatch.setattr(file, attribute, Recorded(attribute, counting))
    yield counting


MODELS: dict[str, tuple[Decoder, int, int]] = {}
MODELS["dense"] = (attends(), 5, 3)
MODELS["experts"] = (feeds(MoE(8, HIDDEN, 2)), 6, 3)
MODELS["latent"] = (decoder(MLA(3, 9, 5, 4, 7, RoPE(interleaved=True)), GatedMLP(HIDDEN)), 6, 3)
MODELS["Mamba-2"] = (decoder(Mamba2(24, 4, 5, groups=2), None), 4, 3)


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("name", MODELS)
def test_launches(launches: Launches, name: str, batch: int) -> None:
    model, each, outside = MODELS[name]
    found = []
    for layers in (1, 3):
        graph = replace(model, layers=layers).graph()
        module: Any = build_module(graph).to("meta", torch.bfloat16).eval()
        step = build_step(graph, module)
        cache = module.new_cache(batch, 16)
        ids = torch.zeros(batch, 1, dtype=torch.int64, device="meta")
        with torch.inference_mode():
            step(ids, ids.clone(), cache)
            launches.found.clear()
            with launches:
                step(ids, ids.clone(), cache)
        found.append(launches.found.copy())
    per_layer = {k: n / 2 for k, n in (found[1] - found[0]).items()}
    print(name, batch, sum(per_layer.values()), dict(per_layer), "outside", {k: n - per_layer.get(k, 0) for k, n in found[0].items() if n - per_layer.get(k, 0)})
