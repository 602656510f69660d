"""An engine that holds a folder by the contract of the Transformers backends of vLLM and SGLang, in one process.

Written from what both document, and what their backends for models of transformers do when they load one: they build
the base model from the config, put linear maps of their own in the place of `nn.Linear` by ``base_model_tp_plan`` (its
names are regular expressions, matched from the beginning), one module in the place of the weights of experts, one that
hands on its first argument in the place of what other stages of ``base_model_pp_plan`` have, and own the head. They
read every other number from the config. Tokens of several texts come in one row, without mask and cache. Devices are
threads here, which add up what they make.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "engine"  # as vllm and sglang


@dataclass(frozen=True)
class Engine:
    """The differences between the two engines."""

    name: str
    softcap: bool  # of scores, by attn_logit_softcapping
    window_without_types: bool  # sliding_window counts for all layers of a config without layer_types
    head_bias: bool
    scales_first: bool  # logits, before they are squashed


VLLM = Engine("vLLM", True, True, True, False)
SGLANG = Engine("SGLang", False, False, False, True)


class Devices:
    """`count` threads that add up tensors."""

    def __init__(self, count: int) -> None:
        self.count, self._barrier = count, threading.Barrier(count, timeout=30)
        self._given: list[Tensor] = [torch.empty(0)] * count

    def sum(self, rank: int, x: Tensor) -> Tensor:
        self._given[rank] = x
        self._barrier.wait()
        made = torch.stack(self._given).sum(0)
        self._barrier.wait()
        return made

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def guarded(rank: int) -> Any:
            try:
                with torch.no_grad():
                    return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.count)]
            failures = [e for f in futures if (e := f.exception()) is not None]
            for failure in failures:  # the first that is not a broken barrier
                if not isinstance(failure, threading.BrokenBarrierError):
                    raise failure
            return [f.result() for f in futures]


class Linear(nn.Module):
    """A linear map of an engine, by rows of its weight (colwise), by columns (rowwise), or whole."""

    def __init__(self, old: nn.Linear, style: str, rank: int, devices: Devices) -> None:
        super().__init__()
        assert style in ("colwise", "rowwise", "replicate")
        self.style, self.rank, self.devices = style, rank, devices
        weight, bias = old.weight.detach(), None if old.bias is None else old.bias.detach()
        if style == "colwise":
            weight, bias = _part(weight, 0, self), None if bias is None else _part(bias, 0, self)
        elif style == "rowwise":
            weight = _part(weight, 1, self)
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        if self.style != "rowwise":
            return F.linear(x, self.weight, self.bias)
        made = self.devices.sum(self.rank, F.linear(x, self.weight))
        return made if self.bias is None else made + self.bias


class Experts(nn.Module):
    """The fused experts of an engine: SwiGLU of all of them, each divided among devices, or whole ones on each."""

    def __init__(self, old: Any, config: Any, whole: bool, rank: int, devices: Devices) -> None:
        super().__init__()
        self.rank, self.devices = rank, devices
        up, down = old.gate_up_proj.detach(), old.down_proj.detach()
        hidden = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        assert tuple(up.shape) == (config.num_experts, 2 * hidden, config.hidden_size)
        assert tuple(down.shape) == (config.num_experts, config.hidden_size, hidden)
        self.k = config.num_experts_per_tok
        gate, up = up.chunk(2, 1)
        self.first = 0
        if whole:
            self.gate, self.up, self.down = (_part(w, 0, self) for w in (gate, up, down))
            self.first = rank * len(self.gate)
        else:
            self.gate, self.up, self.down = _part(gate, 1, self), _part(up, 1, self), _part(down, 2, self)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        assert top_k_index.shape == top_k_weights.shape == (len(hidden_states), self.k)
        made = torch.zeros_like(hidden_states)
        for i, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            token, place = (top_k_index == self.first + i).nonzero(as_tuple=True)
            x = F.silu(hidden_states[token] @ gate.T) * (hidden_states[token] @ up.T)
            made.index_add_(0, token, x @ down.T * top_k_weights[token, place, None])
        return self.devices.sum(self.rank, made)


class Norm(nn.Module):
    """The RMSNorm of an engine, of what it reads from the one that it replaces."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        weight = old.weight
        self.eps, self.scale = float(old.eps), None if weight is None else weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        made = x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return made if self.scale is None else made * self.scale


class Table(nn.Module):
    """The embedding of an engine, of the rows and the scale of the one that it replaces."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(old.weight.detach()), float(getattr(old, "embed_scale", 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight) * self.scale


class Missing(nn.Identity):
    """A module of another stage: it hands on its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


class Attention:
    """The attention of a layer, which knows the texts of a call, and what the config says of heads and windows."""

    def __init__(self, config: Any, layer: int, engine: Engine, devices: int, lengths: Sequence[int]) -> None:
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        assert heads % devices == kv_heads % devices == 0
        self.heads, self.kv_heads = heads // devices, kv_heads // devices
        self.width = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.softcap = getattr(config, "attn_logit_softcapping", None) if engine.softcap else None
        self.lengths, self.window, window = lengths, None, getattr(config, "sliding_window", None)
        if (kinds := getattr(config, "layer_types", None)) is None:
            self.window = window if engine.window_without_types else None
        elif kinds[layer] == "sliding_attention":
            self.window = window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Attention of each text to itself: [tokens, heads · width] of each → [tokens, heads · width]."""
        q = q.unflatten(-1, (self.heads, self.width)).transpose(0, 1)
        k, v = (x.unflatten(-1, (self.kv_heads, self.width)).transpose(0, 1) for x in (k, v))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 0) for x in (k, v))
        made, start = [], 0
        for n in self.lengths:
            part = slice(start, start + n)
            start += n
            apart = torch.arange(n)[:, None] - torch.arange(n)
            seen = (apart >= 0) & (apart < (self.window or n))
            scores = q[:, part] @ k[:, part].mT * scaling
            scores = scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)
            made.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, part]).transpose(0, 1).flatten(1))
        return torch.cat(made)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    attention_instances: dict[int, Attention],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that an engine registers: it finds the attention of the layer by its number."""
    assert attention_mask is None
    tokens = query.shape[-2]
    q, k, v = (x.transpose(1, 2).reshape(tokens, -1) for x in (query, key, value))
    index = module.layer_idx
    assert isinstance(index, int)
    return attention_instances[index].attend(q, k, v, float(scaling)), None


class Held:
    """The part of a folder's model that device `rank` of stage `stage` holds."""

    def __init__(
        self, folder: Path, engine: Engine, rank: int, devices: Devices, stage: int, stages: int, whole_experts: bool
    ) -> None:
        self.config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        self.config._attn_implementation = NAME
        self.engine, self.rank, self.devices, self.stage, self.stages = engine, rank, devices, stage, stages
        self.model = AutoModel.from_config(self.config, trust_remote_code=True).eval()
        assert type(self.model).is_backend_compatible() and self.model._supports_attention_backend
        self.weights = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
        own = {k.removeprefix("model."): v for k, v in self.weights.items() if k.startswith("model.")}
        table = self.model.get_input_embeddings().weight
        assert tuple(table.shape) == (self.config.vocab_size, self.config.hidden_size)
        missing = self.model.load_state_dict(own, strict=False)
        assert not missing.missing_keys and not missing.unexpected_keys
        self._keep_stage()
        plan = {f"model.{k}": style for k, style in self.model.tp_plan.items()}
        self._replace(self.model, "model", plan, whole_experts)
        if not isinstance(self.model.get_input_embeddings(), Missing):
            self.model.set_input_embeddings(Table(self.model.get_input_embeddings()))

    def _keep_stage(self) -> None:
        """Keep the layers of this stage, and what stands before or behind them on the first or last."""
        self.layers = range(self.config.num_hidden_layers)
        if self.stages == 1:
            return
        names = list(self.model._pp_plan)
        (place,) = (i for i, name in enumerate(names) if isinstance(self.model.get_submodule(name), nn.ModuleList))
        layers = self.model.get_submodule(names[place])
        assert len(layers) == self.config.num_hidden_layers
        each = len(layers) // self.stages
        self.layers = range(self.stage * each, len(layers) if self._last else (self.stage + 1) * each)
        for i in range(len(layers)):
            if i not in self.layers:
                layers[i] = Missing()
        if self.stage and not (self._last and self.config.tie_word_embeddings):
            for name in names[:place]:
                self.model.set_submodule(name, Missing())
        if not self._last:
            for name in names[place + 1 :]:
                self.model.set_submodule(name, Missing())

    @property
    def _last(self) -> bool:
        return self.stage == self.stages - 1

    def _replace(self, module: nn.Module, path: str, plan: dict[str, str], whole_experts: bool) -> None:
        for name, child in list(module.named_children()):
            own = [*child.parameters(recurse=False)]
            if isinstance(child, nn.Linear):
                pattern = next((p for p in plan if re.match(p, f"{path}.{name}")), None)
                style = plan[pattern] if pattern else "replicate"
                setattr(module, name, Linear(child, style, self.rank, self.devices))
            elif type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, Norm(child))
            elif name == "experts" and own and all(p.ndim == 3 for p in own):
                setattr(module, name, Experts(child, self.config, whole_experts, self.rank, self.devices))
            else:
                self._replace(child, f"{path}.{name}", plan, whole_experts)

    def hidden(self, entering: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Run the base model on token ids [1, tokens], or on hidden states of the stage before."""
        attend = {i: Attention(self.config, i, self.engine, self.devices.count, lengths) for i in self.layers}
        given = {"inputs_embeds" if self.stage else "input_ids": entering}
        made = self.model(
            **given, use_cache=False, position_ids=positions, attention_instances=attend, return_dict=False
        )
        assert isinstance(made[0], Tensor)
        return made[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Run the head of the engine, by the config."""
        config, tied = self.config, self.config.tie_word_embeddings
        weight = self.model.get_input_embeddings().weight if tied else self.weights["lm_head.weight"]
        bias = self.weights.get("lm_head.bias")
        assert bias is None or self.engine.head_bias
        made = F.linear(hidden, weight, bias)
        scale, cap = getattr(config, "logit_scale", 1.0), getattr(config, "final_logit_softcapping", None)
        made = made * scale if self.engine.scales_first else made
        made = made if cap is None else cap * torch.tanh(made / cap)
        return made if self.engine.scales_first else made * scale


def serve(
    folder: Path, engine: Engine, texts: Sequence[Tensor], tp: int = 1, pp: int = 1, whole_experts: bool = False
) -> list[list[Tensor]]:
    """The logits of each of `texts`, all in one row, on each device of the last stage."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_function)
    lengths = [len(text) for text in texts]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    made: list[Tensor] = [torch.cat(list(texts))[None]] * tp
    for stage in range(pp):
        devices = Devices(tp)
        parts = [Held(folder, engine, rank, devices, stage, pp, whole_experts) for rank in range(tp)]
        made = devices.run(lambda rank, parts=parts, made=made: parts[rank].hidden(made[rank], positions, lengths))
    with torch.no_grad():
        return [[*part.logits(hidden[0]).split(lengths)] for part, hidden in zip(parts, made, strict=True)]


def _part(weight: Tensor, axis: int, of: Any) -> Tensor:
    """The part of a tensor that a device has."""
    assert weight.shape[axis] % of.devices.count == 0
    return weight.chunk(of.devices.count, axis)[of.rank].contiguous()
