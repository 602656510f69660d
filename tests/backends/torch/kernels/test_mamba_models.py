"""Models with Mamba and Mamba-2, whose prompts the kernels read: at once, in pieces, and between steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ....e2e.random_models import strong
from ....lowered import build_module
from ....passes.zoo_variants import VARIANTS
from ....sampling import others_long
from ..generated import assert_close, tolerance

LENGTH = 14
MODELS = {
    "Mamba": "mamba_scan",
    "Mamba-2": "mamba2_scan",
    "Mamba-2 in groups": "mamba2_scan",
    "Mamba, norms": "mamba_scan",
}


@pytest.mark.parametrize("name", others_long(MODELS, 2))
def test_mamba_prompts_in_pieces_agree_with_the_interpreter(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads every piece, from the state that the one before it left; with gradients torch does."""
    graph = strong(VARIANTS[name].graph())
    module: Any = build_module(graph, device=device).eval()
    source, calls = sys.modules[type(module).__module__], list[int]()
    kernel: Callable[..., Any] = vars(source)[MODELS[name]]

    def counted(x: torch.Tensor, *operands: Any, **options: Any) -> Any:
        calls.append(x.shape[1])
        return kernel(x, *operands, **options)

    monkeypatch.setattr(source, MODELS[name], counted)
    tokens = torch.randint(1, 9, (2, LENGTH), generator=torch.Generator().manual_seed(6)).to(device)
    want = module(tokens)
    assert want.requires_grad and calls == []
    exact, layers = want.detach().double().cpu().numpy(), len(module.layers)
    for cuts in ([LENGTH], [2, 9, 3], [6, 1, 1, 4, 2]):
        cache = module.new_cache(2, LENGTH)
        with torch.no_grad():
            found = torch.cat([module(piece, cache=cache) for piece in tokens.split(cuts, 1)], 1)
        assert_close(found.cpu(), exact, tolerance(graph, torch.float32))
        assert calls == [cut for cut in cuts for _ in range(layers)]
        calls.clear()
