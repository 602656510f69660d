"""One process of a model cut by its parallel.py, without weft: ``torchrun parallel_worker.py FOLDER`` runs every model
in the folder and keeps what it saw as FOLDER/MODEL/RANK.pt."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor


def main() -> None:
    mesh = init_device_mesh("cpu", (int(sys.argv[2]),))
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        torch.save(run(folder, mesh), folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    given = torch.load(folder / "given.pt")
    model = load(folder / "model.py").Model().double()
    model.load_state_dict(given["weights"])
    model = load(folder / "parallel.py").parallelize(model, mesh)
    found = observed(model, given["ids"], given["prompt"])
    model.checkpointing = True
    found["again"] = observed(model, given["ids"], given["prompt"])["gradients"]
    found["local"] = {n: p.to_local().numel() for n, p in model.named_parameters() if isinstance(p, DTensor)}
    return found


def load(path: Path) -> Any:
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def observed(model: Any, ids: torch.Tensor, prompt: int) -> dict[str, Any]:
    """Logits and gradients of a full pass, and the logits of a prompt and single tokens through a cache."""
    model.zero_grad()
    logits = model(ids)
    torch.autograd.backward(logits.square().mean())
    gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
    cache = model.new_cache(len(ids), ids.shape[1])
    with torch.no_grad():
        calls = [model(ids[:, :prompt], cache=cache)]
        calls += [model(ids[:, i : i + 1], cache=cache) for i in range(prompt, ids.shape[1])]
    heads = [state.k.shape[1] for state in cache if hasattr(state, "k")]
    return {"logits": logits.detach(), "gradients": gradients, "calls": torch.cat(calls, 1), "heads": heads}


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


if __name__ == "__main__":
    main()
    os._exit(0)  # an ordinary exit may abort: caches of DTensor keep the threads of gloo (PyTorch 2.13)
