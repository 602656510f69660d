"""One process of models cut by their parallel.py, without weft: ``torchrun parallel_worker.py FOLDER`` runs every model
in the folder, a compiled one, and keeps what it saw as FOLDER/MODEL/RANK.pt."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor


def main() -> None:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.set_num_threads(1)
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        torch.save(run(folder, mesh), folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    given = torch.load(folder / "given.pt")
    modules = [name for name in sys.modules if name.partition(".")[0] in ("model", "decode", "parallel", "kernels")]
    for name in modules:  # of the folder before
        del sys.modules[name]
    sys.path[0] = str(folder)
    made = importlib.import_module("model").Model
    parallelize, step = (importlib.import_module(name) for name in ("parallel", "decode"))
    model = made().double()
    model.load_state_dict(given["weights"])
    model = parallelize.parallelize(model, mesh)
    found = observed(model, given["ids"], given["prompt"])
    model.checkpointing = True
    found["again"] = gradients(model, given["ids"])[1]
    found["local"] = {n: p.to_local().numel() for n, p in model.named_parameters() if isinstance(p, DTensor)}
    model = made()
    model.load_state_dict(given["weights"])
    model = parallelize.parallelize(model, mesh)
    decode = step.Step(model)
    found["steps"] = stepped(model, decode, given["ids"], given["prompt"])
    with torch.no_grad():
        found["after"] = model(given["ids"])
    queries, packed = model.layers[1].attn.q.weight.to_local(), decode.layers[1].attn_qkv
    found["views"] = queries.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    return found


def stepped(model: Any, step: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """The logits of single tokens by the decode `step` behind a prompt that the model reads."""
    cache = model.new_cache(len(ids), ids.shape[1])
    with torch.no_grad():
        model(ids[:, :prompt], cache=cache)
    with torch.inference_mode():
        made = [step(ids[:, i : i + 1], torch.full((len(ids), 1), i), cache) for i in range(prompt, ids.shape[1])]
    return torch.cat(made, 1)


def observed(model: Any, ids: torch.Tensor, prompt: int) -> dict[str, Any]:
    """Logits and gradients of a full pass, and the logits of a prompt and single tokens through a cache."""
    logits, gradient = gradients(model, ids)
    cache = model.new_cache(len(ids), ids.shape[1])
    with torch.no_grad():
        calls = [model(ids[:, :prompt], cache=cache)]
        calls += [model(ids[:, i : i + 1], cache=cache) for i in range(prompt, ids.shape[1])]
    heads = [state.k.shape[1] for state in cache if hasattr(state, "k")]
    return {"logits": logits, "gradients": gradient, "calls": torch.cat(calls, 1), "heads": heads}


def gradients(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of a full pass, and the gradients of the mean of their squares."""
    model.zero_grad()
    logits = model(ids)
    torch.autograd.backward(logits.square().mean())
    return logits.detach(), {n: whole(p.grad) for n, p in model.named_parameters()}


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


if __name__ == "__main__":
    main()
    os._exit(0)  # an ordinary exit may abort: caches of DTensor keep the threads of gloo (PyTorch 2.13)
