"""Folders of PyTorch: they contain the kernels that model.py imports."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from weft.backends.torch.codegen.model_source import write_source
from weft.backends.torch.package.source_folder import generate_model, write_code
from weft.frontends.app.api.modules import build_step_graphs

from ....lowered import lower
from ..generated import alone, call, feeds_of, graph_of, module_of, tensors


def test_folder_contains_the_kernels_that_its_model_imports(tmp_path: Path) -> None:
    """Check that the folder computes what the module does without weft; a model without windows imports no kernel."""
    graph = graph_of("family/gpt-oss")
    built = generate_model(build_step_graphs(graph))
    assert {"shared.online_softmax", "shared.launch", "prefill.window_attention"} <= set(built.kernels)
    assert write_source(lower(graph_of("family/llama-gqa-tied"))).kernels == []
    write_code(built, tmp_path)
    ids, weights = tensors(feeds_of("family/gpt-oss"))["input_ids"], module_of("family/gpt-oss").state_dict()
    with alone(tmp_path), torch.inference_mode():
        model = importlib.import_module("model").Model()
        model.load_state_dict(weights)
        made = model(ids)
    (want,) = call(module_of("family/gpt-oss"), {"input_ids": ids})
    assert torch.equal(made, want)
