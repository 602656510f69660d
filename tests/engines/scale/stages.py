"""A pipeline of processes by ``base_model_pp_plan``: microbatches go through its stages and back (Huang 2019)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from .contract import Missing
from .jobs import loaded
from .processes import Counted


def keep_stage(base: Any, stage: int, stages: int) -> None:
    """Keep the modules of one stage: the embedding on the first and, if it is the head, on the last."""
    names = list(base._pp_plan)
    place = next(i for i, name in enumerate(names) if isinstance(base.get_submodule(name), nn.ModuleList))
    layers, last = base.get_submodule(names[place]), stage == stages - 1
    each = len(layers) // stages
    own = range(stage * each, len(layers) if last else (stage + 1) * each)
    for i in range(len(layers)):
        if i not in own:
            layers[i] = Missing()
    dropped = names[:place] if stage and not (last and base.config.tie_word_embeddings) else []
    for name in [*dropped, *(names[place + 1 :] if not last else [])]:
        base.set_submodule(name, Missing())


def trained(folder: Path, ids: Any, microbatches: int, steps: int) -> dict[str, Any]:
    """The losses of steps of SGD over `microbatches`, the weights of this stage after them, and the bytes that it sent
    for a step."""
    model, stage, stages = loaded(folder, {}).train(), dist.get_rank(), dist.get_world_size()
    last, tied = stage == stages - 1, model.config.tie_word_embeddings
    ends = dist.new_group([0, stages - 1])
    keep_stage(model.model, stage, stages)
    if not last:
        model.lm_head = Missing()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.03), []
    for _ in range(steps):
        optimizer.zero_grad()
        with Counted() as counted:
            losses.append(step(model, torch.from_numpy(ids).chunk(microbatches)))
        if tied and (stage == 0 or last):
            dist.all_reduce(model.get_input_embeddings().weight.grad, group=ends)
        optimizer.step()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return {"losses": losses, "weights": weights, "bytes": counted.bytes["send"]}


def step(model: Any, batches: tuple[Tensor, ...]) -> float:
    """Send all microbatches forward, then their gradients back; return the loss, 0 before the last stage."""
    stage, stages = dist.get_rank(), dist.get_world_size()
    entered, left, total = [], [], 0.0
    for batch in batches:
        given = {"input_ids": batch}
        if stage:
            x = torch.empty(*batch.shape, model.config.hidden_size)
            dist.recv(x, stage - 1)
            given = {"inputs_embeds": x.requires_grad_()}
            entered.append(x)
        made = model.model(**given, use_cache=False).last_hidden_state
        if stage == stages - 1:
            scores = model.lm_head(made)[:, :-1].flatten(0, 1)
            made = F.cross_entropy(scores, batch[:, 1:].flatten()) / len(batches)
            total += made.item()
        else:
            dist.send(made.detach().contiguous(), stage + 1)
        left.append(made)
    for i, made in enumerate(left):
        if stage == stages - 1:
            made.backward()
        else:
            gradient = torch.empty_like(made)
            dist.recv(gradient, stage + 1)
            made.backward(gradient)
        if stage:
            sent = entered[i].grad
            assert sent is not None
            dist.send(sent, stage - 1)
    return total
