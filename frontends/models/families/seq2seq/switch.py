"""Switch Transformers: T5 with some feed-forwards replaced by mixtures of experts, one expert per token."""

from __future__ import annotations

from ....dsl import MoE, Router
from ...tables.family import Config, Names, key
from ...tables.settings import ACTIVATIONS
from ..experts.mixtral import stack_experts
from .t5 import T5


def _build_sparse_layers(config: Config, layers: int, sparse: int) -> tuple[MoE | None, ...]:
    """Return per layer a mixture of experts, in `sparse` evenly spaced layers of `layers`, or None in all others."""
    moe = MoE(
        config.get("num_experts", 8),
        key("d_ff")(config),
        1,
        ACTIVATIONS[config.get("dense_act_fn", "relu")],
        gated=False,
        router=Router(
            renormalize=False, bias=config.get("router_bias", False), capacity=config.get("expert_capacity", 64)
        ),
    )
    step = layers // sparse if sparse else layers
    return tuple(moe if step == 1 or i % step == 1 else None for i in range(layers))


def _read_decoder(config: Config) -> dict[str, object]:
    layers = key("num_decoder_layers", "num_layers")(config)
    return {"layers": layers, "moe": _build_sparse_layers(config, layers, config.get("num_sparse_decoder_layers", 3))}


def _map_names(part: str, ffn: int) -> Names:
    """Return the names of `part` (encoder or decoder) that differ from T5; `ffn` is its feed-forward's index."""
    ours, theirs = f"{part}.layers.{{i}}.ffn", f"{part}.block.{{i}}.layer.{ffn}.mlp"
    return {
        f"{ours}.up": f"{theirs}.wi",
        f"{ours}.down": f"{theirs}.wo",
        f"{ours}.router": f"{theirs}.router.classifier",
        f"{ours}.experts.up": stack_experts(f"{theirs}.experts.expert_{{e}}.wi"),
        f"{ours}.experts.down": stack_experts(f"{theirs}.experts.expert_{{e}}.wo"),
    }


SWITCH = T5.derive(
    "switch_transformers",
    inert=("encoder_sparse_step", "decoder_sparse_step"),
    names={**_map_names("encoder", 1), **_map_names("decoder", 2)},
    refuse={"dense_act_fn": (*ACTIVATIONS, None), "feed_forward_proj": ("relu", None)},
    activation=key("dense_act_fn", default="relu"),
    gated=False,
    moe=lambda c: _build_sparse_layers(c, key("num_layers")(c), c.get("num_sparse_encoder_layers", 3)),
    decoder=_read_decoder,
)
