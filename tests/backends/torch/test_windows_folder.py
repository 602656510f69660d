"""Folders of models with windows: the kernels that model.py imports stand beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from weft.backends.torch.codegen.source import write_source
from weft.backends.torch.lower.lower import lower
from weft.backends.torch.package.export import build, write_code

from .generated import call, feeds_of, graph_of, module_of, tensors


def test_a_folder_has_the_kernels_that_its_model_imports(tmp_path: Path) -> None:
    """The folder alone computes what the module in process does; a model without windows imports no kernel."""
    graph = graph_of("family/gpt-oss")
    made = build(graph)
    assert {"shared.attend", "shared.launch", "prompt.window_attention"} <= set(made.kernels)
    assert write_source(lower(graph_of("family/llama-gqa-tied"))).kernels == []
    write_code(made, tmp_path)
    torch.save(module_of("family/gpt-oss").state_dict(), tmp_path / "weights.pt")
    ids = tensors(feeds_of("family/gpt-oss"))["input_ids"]
    torch.save(ids, tmp_path / "ids.pt")
    script = """
import sys, torch
from model import Model
assert not any(name.startswith("weft") for name in sys.modules)
model = Model()
model.load_state_dict(torch.load("weights.pt"))
with torch.inference_mode():
    torch.save(model(torch.load("ids.pt")), "logits.pt")
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    (want,) = call(module_of("family/gpt-oss"), {"input_ids": ids})
    assert torch.equal(torch.load(tmp_path / "logits.pt"), want)
