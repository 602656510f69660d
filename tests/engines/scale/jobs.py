"""Jobs of one process of a group: load its part of a folder, run it, and return the results as arrays."""

from __future__ import annotations

import warnings
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from .processes import Counted

NEW = 5  # tokens


def loaded(folder: Path, divided: dict[str, Any]) -> Any:
    """The model of a folder, divided by transformers."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("torch.distributed").setLevel(ERROR)  # it tells how it puts tensors together that two axes divide
    config = DistributedConfig(**divided) if divided else None
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, distributed_config=config).eval()


def logits(folders: list[Path], ids: Any, divided: dict[str, Any]) -> list[dict[str, Any]]:
    """For each folder the logits of token ids, the tokens that follow, what was sent for the logits, and the bytes of
    the weights that this process holds."""
    results = []
    for folder in folders:
        model, given = loaded(folder, divided), torch.from_numpy(ids)
        with torch.no_grad(), Counted() as counted:
            made = model(given, use_cache=False).logits
        followed = model.generate(given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        results.append({"logits": made.numpy(), "tokens": followed.numpy(), "weights": held(model)})
        results[-1] |= {"bytes": dict(counted.bytes), "calls": dict(counted.calls)}
    return results


def held(model: Any) -> int:
    """The bytes of the weights that this process holds; tied ones once."""
    return sum(t.numel() * t.element_size() for t in map(local, {id(p): p for p in model.parameters()}.values()))


def local(tensor: Any) -> Tensor:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert isinstance(part, Tensor)
    return part


def trained(folder: Path, ids: Any, divided: dict[str, Any], steps: int) -> dict[str, Any]:
    """The losses of steps of SGD, each on rows that groups of processes share out, and the weights after them."""
    model, given = loaded(folder, divided).train(), torch.from_numpy(ids)
    groups, tp = divided.get("fsdp_size", 1), divided.get("tp_size", 1)
    rank = dist.get_rank() // tp
    own = given[rank % groups :: groups]
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.03), []
    for _ in range(steps):
        loss = model(own, labels=own, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = {name: whole(p).detach().numpy() for name, p in model.named_parameters()}
    return {"losses": losses, "weights": weights, "held": held(model)}


def whole(tensor: Any) -> Tensor:
    """A tensor that processes share, put together."""
    made = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    assert isinstance(made, Tensor)
    return made
