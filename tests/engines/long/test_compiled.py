"""A folder compiled by PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ..compiled import compiled, error, loaded, texts


@pytest.mark.parametrize("name", ["preset/smollm2-135m", "preset/mixtral-8x7b"])
def test_folder_compiles_as_one_graph(name: str, tmp_path: Path) -> None:
    """Without breaks, at lengths that differ, and backward."""
    model = loaded(compiled(name, tmp_path / "folder")).train()
    fast: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seq in (8, 8, 11):
        ids, gradients = texts(2, seq, 37), []
        for net in (model, fast):
            model.zero_grad()
            net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert error(gradients[1], gradients[0]) <= 1e-5
    torch.compiler.reset()
