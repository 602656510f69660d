"""Write low-rank matrices as an adapter of the library PEFT (LoRA; Hu 2021, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from weft.ir.graph import Graph
from weft.ir.recipes import Source
from weft.ir.storage import replace_file
from weft.ir.storage.documents import write_json
from weft.passes.fitting.matrices import Matrix, find_matrices

from ..formats.hf.adapter import ADAPTER_CONFIG
from ..formats.hf.safetensors import ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor


def find_adaptable(graph: Graph) -> dict[str, str]:
    """Return the parameters of `graph` for which an adapter has names: weights of linear layers that are a tensor of a
    checkpoint as it is. Parameter name → the tensor's name without ``.weight``."""
    return {
        param.name: param.recipe.key.removesuffix(".weight")
        for param, matrix in find_matrices(graph).items()
        if isinstance(matrix, Matrix) and matrix.kind == "linear" and isinstance(param.recipe, Source)
    }


def write_adapter(
    folder: Path, base: Path, graph: Graph, products: Mapping[str, tuple[Tensor, Tensor]], rank: int
) -> None:
    """Write the adapter of `products`, (up [out, rank], down [rank, in]) by parameter of `graph`, into `folder`.
    base: the folder of the model that it adapts."""
    from safetensors.torch import save_file

    names = find_adaptable(graph)
    tensors: dict[str, Tensor] = {}
    for name, (up, down) in products.items():
        prefix = f"base_model.model.{names[name]}"
        tensors |= {
            f"{prefix}.lora_A.weight": down.cpu().contiguous(),
            f"{prefix}.lora_B.weight": up.cpu().contiguous(),
        }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.absolute()),
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(names[name] for name in products),
        "inference_mode": True,
    }
    folder.mkdir(exist_ok=True)
    with replace_file(folder / ADAPTER_WEIGHTS) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    with replace_file(folder / ADAPTER_CONFIG) as partial:
        write_json(partial, config)
