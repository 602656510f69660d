"""The classes of a base model, which is a model without head, or one side of an encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.passes.library.target.sides import DECODER, LOSS

from ...codegen.classes import ClassSource
from ...codegen.structure import Method, group_statements
from ..lower.lower_base_and_head import LoweredModel
from ..lower.model_emitter import FULL
from .initial import write_expert_lines, write_init_lines
from .model_classes import HFClassWriter, read_config
from .stack import Stack, find_stack, list_attentions, list_cache_kinds, loop_single_layers, number_caches

SIDE_TITLES = {"": "Model", "encoder": "Encoder", "decoder": "Decoder"}  # side: the end of its class name
EXTRA_OUTPUTS = {  # output without a field in classes of transformers: its meaning, for a docstring
    LOSS: "the router loss, to be added to the loss",
    "sentence_embedding": "one vector for each batch row [batch, width]",
}


@dataclass
class BaseModel:
    """The classes of a base model.

    name: name of its main class. returned: name of the class of its outputs. method: its forward. stack: its layers,
    None without a list of layers. blocks: the class name of each layer, in order.
    """

    lowered: LoweredModel
    name: str
    returned: str
    method: Method
    stack: Stack | None
    writer: HFClassWriter
    blocks: list[str]

    @property
    def path(self) -> str:
        """Return "encoder." or "decoder.", its path in an encoder-decoder; "" for other models."""
        return f"{self.lowered.side}." if self.lowered.side else ""

    @property
    def count_field(self) -> str:
        """Return the name of the config field with the number of layers."""
        return self.writer.count_field

    @property
    def block_types(self) -> str:
        """Return the name of the config field that lists the class of each layer."""
        return f"{'encoder_' * self.is_second}block_types"

    @property
    def is_second(self) -> bool:
        """Return whether this is the encoder of an encoder-decoder, whose config fields have the prefix encoder_."""
        return self.lowered.side not in ("", DECODER)

    @property
    def kinds(self) -> list[str]:
        """Return the kind of each cache (see `stack.list_cache_kinds`), in order of cache number."""
        return list_cache_kinds(self.method, self.lowered.emitter, self.stack)

    @property
    def needs_kinds(self) -> bool:
        """Return whether the config must list the kinds of caches: with several caches per layer, with kinds other than
        full, or with a window or chunk in the config, which transformers would apply to all layers, and SGLang to none.
        The encoder of an encoder-decoder never needs it."""
        kinds, windows = set(self.kinds), {"sliding_window", "attention_chunk_size"} & self.lowered.fields.values.keys()
        several = self.stack is not None and self.count_field == "num_blocks"
        return not self.is_second and (several or (bool(kinds) and (bool(windows) or kinds != {FULL})))

    @property
    def inner_methods(self) -> dict[str, Method]:
        """Return class name → forward of all classes except the main class and those reused from another base model."""
        return {k: m for k, m in self.writer.methods.items() if m is not self.method and k not in self.writer.reused}

    @property
    def classes(self) -> list[ClassSource]:
        """Return the classes of `inner_methods`."""
        return [c for k, c in self.writer.classes.items() if k in self.inner_methods]

    @property
    def extra_outputs(self) -> dict[str, str]:
        """Return name → meaning of the outputs for which no class of transformers has a field."""
        return {name: EXTRA_OUTPUTS[name] for name in self.lowered.base.outputs if name in EXTRA_OUTPUTS}

    @property
    def main_class(self) -> ClassSource:
        """Return the main class, that of the base model itself."""
        return self.writer.classes[self.name]


def write_base_model(
    lowered: LoweredModel, name: str, config: str, usual: float, others: Sequence[BaseModel]
) -> BaseModel:
    """Return the classes of `lowered`, whose class names begin with `name`; `config` is the config class's name. usual:
    the most common standard deviation of initial weights. others: base models whose equal classes are reused."""
    e, program = lowered.emitter, lowered.base
    top, title = group_statements(program), f"{name}{SIDE_TITLES[lowered.side]}"
    if not e.shares_weights:
        loop_single_layers(top, program)
    stack = None if e.shares_weights else find_stack(top, e)  # where layers share weights, their number is fixed
    part = SIDE_TITLES[lowered.side] if lowered.side else ""
    returned = f"{name}{part}Output" if EXTRA_OUTPUTS.keys() & program.outputs.keys() else get_output_class(lowered)
    writer = HFClassWriter(program, e, title, config, returned, stack)
    writer.table = f"{'ENCODER_' * (lowered.side == 'encoder')}BLOCKS"
    writer.usual_std = usual
    for base in others:
        writer.other_classes |= base.writer.other_classes | base.writer.own_classes
    caching = [] if stack is None else [c for c in stack.calls if number_caches(c.callee, e).count]
    only_layers = stack is None or number_caches(top, e).count in (0, len(caching), len(stack))
    writer.count_field = "num_hidden_layers" if only_layers and (stack is None or stack.caches == 1) else "num_blocks"
    if lowered.side == "encoder":
        writer.count_field = "encoder_layers"
    writer.write(top)
    blocks = [writer.names[c.callee.key] for c in stack.calls] if stack else []
    return BaseModel(lowered, title, returned, top, stack, writer, blocks)


def get_output_class(lowered: LoweredModel) -> str:
    """Return the name of transformers' output class for cross-attentions, else for a pooler, a cache, or neither."""
    if lowered.emitter.cross_attentions:
        return "BaseModelOutputWithPastAndCrossAttentions"
    if "pooler_output" in lowered.base.outputs:
        return "BaseModelOutputWithPooling"
    return "BaseModelOutputWithPast" if lowered.emitter.cached else "BaseModelOutput"


def finish_classes(base: BaseModel) -> None:
    """Rewrite the methods of all classes of `base`, in place, to read sizes from attributes or self.config."""
    for c in base.classes:
        read_config(c.lines, c.init)
    read_config(base.main_class.lines, base.main_class.init, top=True)


def write_init_weights(base: BaseModel, usual: float) -> list[str]:
    """Return the lines of ``_init_weights`` for all classes of `base`; `usual` as in `write_base_model`."""
    methods, weights = {**base.inner_methods, base.name: base.method}, base.lowered.base.weights
    lines = write_init_lines(methods, weights, usual)
    return lines + write_expert_lines(base.lowered.emitter.experts, weights, usual)


def write_recorders(base: BaseModel) -> list[str]:
    """Return the line of the class attribute that lists the outputs that transformers can record; [] without any."""
    blocks = dict.fromkeys(sorted(base.blocks), 0)
    recorded = [f'"hidden_states": {_write_recorder(blocks)}'] if blocks else []
    attending: dict[str, dict[str, int]] = {}
    for name, method in base.writer.methods.items():
        for statement, facts in list_attentions(method, base.lowered.emitter) if method is not base.method else ():
            if len(statement.results) == 2 and statement.results[1] in method.outputs:
                kind = "cross_attentions" if facts.node in base.lowered.emitter.cross_attentions else "attentions"
                attending.setdefault(kind, {})[name] = method.outputs.index(statement.results[1])
    recorded += [f'"{kind}": {_write_recorder(places, True)}' for kind, places in attending.items()]
    return [f"_can_record_outputs = {{{', '.join(recorded)}}}"] if recorded else []


def _write_recorder(places: dict[str, int], always: bool = False) -> str:
    """Return the source of recorders of {class: output}; one class alone records output 0, unless `always`."""
    if len(places) == 1 and not always:
        return next(iter(places))
    entries = [f"OutputRecorder({name}, index={i})" for name, i in places.items()]
    return entries[0] if len(entries) == 1 else f"[{', '.join(entries)}]"


def write_capabilities(bases: Sequence[BaseModel]) -> list[str]:
    """Return the lines of class attributes that declare the capabilities of a model to transformers."""
    emitters = [base.lowered.emitter for base in bases]
    features = set().union(*(facts.features for e in emitters for facts in e.attentions.values()))
    blocks = sorted({name for base in bases for name in base.blocks})
    cached, lines = any(e.cached for e in emitters), list[str]()
    if blocks:
        lines += ["supports_gradient_checkpointing = True", f"_no_split_modules = {blocks!r}".replace("'", '"')]
    if cached:
        lines.append('_skip_keys_device_placement = ["past_key_values", "cache"]')
    if any(e.attentions for e in emitters):
        able = {
            "_supports_flash_attn": not features & {"s_aux", "position_bias"},
            "_supports_sdpa": not features & {"softcap", "s_aux"},
            "_supports_flex_attn": "position_bias" not in features,
            "_supports_attention_backend": True,
        }
        for value in (True, False):
            names = [name for name, has in able.items() if has is value]
            lines += [f"{' = '.join(names)} = {value}"] if names else []
    if cached:
        lines.append("_can_compile_fullgraph = True")
    if any(e.recurrent for e in emitters if e.is_decoder):
        lines.append("_is_stateful = True")
    if len(bases) == 1 and emitters[0].embedding and emitters[0].embedding != "embed_tokens":
        lines.append(f'_input_embed_layer = "{emitters[0].embedding}"')
    return lines
