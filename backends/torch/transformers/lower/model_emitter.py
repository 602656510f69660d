"""The emitter of models for transformers: arguments of the forward, caches of layers, and masks shared by layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import Op
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.passes.analysis.states import find_caches
from weft.passes.library.target.sides import ENCODER, HIDDEN, MASK

from ...program.emitter import Emitter
from ...program.stateful_nodes import find_cached_nodes
from ...program.statements import TOP, CacheSlot, Operand, Statement, Var, simplify_number, write_formula
from ..config_fields.size_names import (
    SOFTCAP_DIVISION,
    Fields,
    SizeNames,
    find_attention,
    get_attention_kind,
    map_logit_nodes,
)

CACHE, INDEX = CacheSlot("cache", "", "Cache"), CacheSlot("layer_idx", "", "int")  # operands of statements
HEAD = "lm_head"
FULL, SLIDING, CHUNKED, RECURRENT = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
ARGUMENTS = {  # the arguments of the forward and their types; all are optional
    **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "position_ids", HIDDEN, MASK), "Tensor | None"),
    "past_key_values": "Cache | None",
    "inputs_embeds": "Tensor | None",
    "use_cache": "bool | None",
}
BIDIRECTIONAL = "bidirectional"
ZEROS = "torch.zeros({1}.shape[:2], dtype=torch.long, device={1}.device)"  # [batch, seq]
STANDARD_MASKS = {  # kind of layer: the function of transformers that computes its mask from the config
    FULL: "create_causal_mask",
    SLIDING: "create_sliding_window_causal_mask",
    CHUNKED: "create_chunked_causal_mask",
    RECURRENT: "create_recurrent_attention_mask",
    BIDIRECTIONAL: "create_bidirectional_mask",
}


@dataclass
class SharedMask:
    """A mask that layers share, and the statement that computes it.

    kind: a key of `STANDARD_MASKS`, or a new name such as window_keys. condition: source of the condition for key ``k``
    to be visible to query ``q`` (positions); "" for a standard kind. causal: keys after the query are also hidden.
    """

    kind: str
    condition: str
    statement: Statement
    causal: bool = True
    nodes: list[Node] = field(default_factory=list)  # the attentions that use it


@dataclass
class AttentionRecord:
    """An attention and how generated code computes it: the source of its scale and of its query heads per KV head
    (`groups`), and the names of optional features (`features`) that the attention function must support."""

    node: Node
    scaling: str
    groups: str
    features: set[str] = field(default_factory=set)  # softcap, s_aux, position_bias, sliding_window

    @property
    def causal(self) -> bool:
        return bool(self.node.attrs["causal"])

    @property
    def module_attributes(self) -> tuple[str, str, bool]:
        """Return (scale, groups, causality), which are attributes of the attention's module."""
        return self.scaling, self.groups, self.causal


class HFEmitter(Emitter):
    """The emitter of a model, or of one side of an encoder-decoder, for transformers.

    names: sizes as expressions over the config `fields`. head: linear map of the logits, or None. side: "encoder" or
    "decoder", "" for other models. separate: each attention is its own module, apart from its projections.
    """

    calls_kernels: ClassVar[bool] = False
    has_comments: ClassVar[bool] = False  # sizes have names

    def __init__(
        self, graph: Graph, names: SizeNames, fields: Fields, head: Node | None, side: str = "", separate: bool = False
    ) -> None:
        super().__init__(graph, find_cached_nodes(graph), set(), find_cross_attentions(graph))
        self.names, self.fields, self.head, self.side, self.separate = names, fields, head, side, separate
        self.softcap_divisions = {node for node, role in map_logit_nodes(graph).items() if role == SOFTCAP_DIVISION}
        # Where layers share weights, calls pass the number of their cache.
        self.shares_weights = has_shared_weights(graph, self.cached | self.cross_attentions)
        self.is_decoder = graph.meta.get("kind", "decoder") == "decoder"
        without = {"token_type_ids", HIDDEN, MASK} - graph.inputs.keys()
        without |= set() if self.is_decoder else {"past_key_values", "use_cache"}
        arguments = {name: kind for name, kind in ARGUMENTS.items() if name not in without}
        self.arguments = {name: Var(name, type=kind, default="None") for name, kind in arguments.items()}
        self.embeds, self.positions = Var("inputs_embeds"), Var("position_ids")
        self.past = Var("past_key_values", type="Cache | None")
        self.self_past = Var("own_past", type="Cache | None") if self.cross_attentions else self.past
        self.attention_mask = self.arguments["attention_mask"]
        self.embedding = ""  # the path of the module that embeds tokens
        self.scaling: Node | None = None  # the scale of the embeddings, which that module computes
        self.masks: dict[object, SharedMask] = {}
        self.attentions: dict[Statement, AttentionRecord] = {}
        self.cross_writes: set[Statement] = set()  # statements that cache keys and values of the encoder
        self.recurrent: dict[Statement, int] = {}  # recurrence: the index of its first state in its layer's cache
        self.experts: dict[str, str] = {}  # path of a mixture's experts: their class
        # scope: {recurrence: (index of its first state, number of states)}; repeated runs have the same entry.
        self.states: dict[str, dict[tuple[Op, Value], tuple[int, int]]] = {}
        for name, value in graph.inputs.items():
            if name == "input_ids":
                self._operands[value] = self.embeds if is_only_embedded(graph, value) else self.arguments["input_ids"]
            elif name == "position_ids":
                self._operands[value] = self.positions
            elif name in (HIDDEN, MASK):
                self._operands[value] = self.arguments[name]
            elif name == "token_type_ids":
                self._operands[value] = ids = Var(name, value.shape)
                self._emit_early(f"{ZEROS} if {{0}} is None else {{0}}", (self.arguments[name], self.embeds), ids, 0)
            elif name == "attention_mask":
                self._operands[value] = self._complete_mask(value)
        self.program.inputs = [*self.arguments.values()]
        self._emit_defaults()

    def size_of(self, value: Value, axis: int = -1) -> Any:
        return self.names.get_size(value, axis)

    def attr(self, node: Node, name: str) -> Any:
        return self.names.get_attr(node, name)

    def _emit_defaults(self) -> None:
        """Emit the defaults of arguments, except `inputs_embeds`; let a cache without keys count the tokens."""
        arguments = self.arguments
        if not self.is_decoder:
            text = "torch.arange({1}.shape[1], device={1}.device)[None] if {0} is None else {0}"
            self._emit_early(text, (arguments["position_ids"], self.embeds), self.positions, 0)
            return
        cache = "DynamicCache(config=self.config)"
        cache = f"EncoderDecoderCache({cache}, DynamicCache())" if self.cross_attentions else cache
        text = f"{cache} if {{0}} and {{1}} is None else {{1}}"
        self._emit_early(text, (arguments["use_cache"], arguments["past_key_values"]), self.past, 1)
        if self.cross_attentions:
            self._emit_early("self_attention_cache({0})", (self.past,), self.self_past)
        past = Var("past", type="int")
        counted = "0 if {0} is None or {1} is not None else {0}.get_seq_length()"  # paged caches do not count tokens
        self._emit_early(counted, (self.past, arguments["position_ids"]), past)
        text = "(torch.arange({1}.shape[1], device={1}.device) + {2})[None] if {0} is None else {0}"
        self._emit_early(text, (arguments["position_ids"], self.embeds, past), self.positions, 0)
        if self.cached and not self.has_counting_cache:
            # After the positions, which need the previous count.
            text = "if {0} is not None: count_tokens({0}, {1})"
            self.program.statements.append(Statement(text, (self.self_past, self.embeds, self.positions), (), TOP))

    def _complete_mask(self, value: Value) -> Var:
        """Return the padding mask `value`. If an op other than attention reads it, emit ones as its default."""
        if all(node.op is ops.attention for node, _ in value.uses):
            return self.attention_mask
        full = Var("attention_mask", value.shape)
        text = f"{ZEROS.replace('zeros', 'ones')} if {{0}} is None else {{0}}"
        self._emit_early(text, (self.attention_mask, self.embeds), full, 0)
        self.attention_mask = full
        return full

    @property
    def masks_name(self) -> str:
        """Return the name of the generated function that computes the masks of all layers."""
        return "encoder_masks" if self.side == ENCODER else "attention_masks"

    @property
    def has_counting_cache(self) -> bool:
        """Return whether the model has a KV cache, which counts the tokens; recurrent states do not count them."""
        return any(find_caches(node) for node in self.cached)

    def emit_embedding(self, text: str, module: Operand) -> None:
        """Emit the embeddings of the token ids as the default of `inputs_embeds`. text: source that embeds ``{1}`` (the
        ids) by ``{2}`` (the operand `module`)."""
        operands = self.arguments["inputs_embeds"], self.arguments["input_ids"], module
        self._emit_early(f"{text} if {{0}} is None else {{0}}", operands, self.embeds, 0)

    def _emit_early(self, text: str, operands: tuple[Operand, ...], made: Var, replaces: int | None = None) -> None:
        self.program.statements.append(Statement(text, operands, (made,), TOP, replaces, early=True))

    def zero_padding(self, value: Value | Operand) -> Var:
        """Emit `value` [batch, seq, width] with zeros at padding, for recurrences, and return the result."""
        return self.emit("mask_hidden({0}, {1})", value, self.padding_mask(), replaces=0)

    def padding_mask(self) -> Var:
        """Return the padding mask [batch, seq] that all recurrences share; emit it at the first call."""
        operands = (self.embeds, self.attention_mask, *([self.self_past] if self.is_decoder else []))
        return self.share_mask(RECURRENT, "", operands, "padding", "Tensor | None").statement.results[0]

    def share_mask(
        self, kind: str, condition: str, operands: Sequence[Operand], name: str, annotation: str, causal: bool = True
    ) -> SharedMask:
        """Return the mask of this `kind` and `condition`; emit its statement at the first call. The statement reads
        `operands`; its result is called `name` and has type `annotation`. `finish_masks` writes its text."""
        key = kind, condition
        if key not in self.masks:
            mask = self.hoist(("mask", key), "...", *operands, name=name)
            mask.type = annotation
            statement = next(s for s in self.program.statements if mask in s.results)
            self.masks[key] = SharedMask(kind, condition, statement, causal)
        return self.masks[key]

    def emit_with_state(
        self, node: Node, slot: CacheSlot, parts: int, text: Callable[[str], str], operands: Sequence[Value | Operand]
    ) -> Var:
        """Emit the recurrence `node`, which stores its `parts` states in the cache of its layer; return its result.
        `text` maps the source of the previous states to that of the call on `operands`; `slot` is not read."""
        states = self.states.setdefault(self.scope, {})
        key = node.op, find_param(get_first_operand(node))
        first, _ = states.setdefault(key, (sum(n for _, n in states.values()), parts))
        cache, index = self.write_self_cache(f"{{{len(operands)}}}"), f"{{{len(operands) + 1}}}"
        place = f"{cache}, {index}" + (f", {first}" if first or parts > 1 else "")
        past = f"past_states({place}{f', {parts}' if parts > 1 else ''})"
        update = f"keep_states({cache}, {index}, {text(past)}{f', {first}' if first else ''})"
        result = self.emit(update, *operands, CACHE, INDEX)
        self.recurrent[self.program.statements[-1]] = first
        # Linear attention divides by 0 before the first visible key.
        return self.zero_padding(result) if node.op is ops.linear_attention else result

    def write_self_cache(self, cache: str) -> str:
        """Return the source of the self-attention part of `cache`: `cache` in a model without cross-attention."""
        return f"self_attention_cache({cache})" if self.cross_attentions else cache

    def resolve_param(self, param: Param) -> Operand:
        """Return the operand of `param`; RoPE frequencies with a formula are an expression over config fields."""
        recipe = param.recipe
        if not isinstance(recipe, RopeFrequencies) or write_formula(recipe) is None:
            return super().resolve_param(param)
        return self.hoist(recipe, self._write_frequencies(recipe), self.embeds, name="frequencies")

    def _write_frequencies(self, recipe: RopeFrequencies) -> str:
        """Return `write_formula(recipe)` with config fields, added to `fields`, for theta and the rotated width."""
        heads = [name for name in self.fields.values if name.endswith("head_dim")]
        width = next((name for name in heads if self.fields.values[name] == recipe.dim), "")
        width = width or self.fields.choose_name("rotary_dim", recipe.dim)
        rotated = None if self.node is None else find_attention(self.node.output)
        kind = "" if rotated is None else get_attention_kind(rotated[0])
        theta = self.fields.choose_name("rope_theta", simplify_number(recipe.theta), kind)
        text = write_formula(recipe) or ""
        start = f"rope_frequencies({recipe.dim}, {simplify_number(recipe.theta)}, "
        named = f"rope_frequencies(config.{width}, config.{theta}, "
        if start not in text:  # a scaled base
            return text
        text = text.replace(start, named)
        return text.replace(f"{{0}}.device), {simplify_number(recipe.theta)}, ", f"{{0}}.device), config.{theta}, ")


def find_cross_attentions(graph: Graph) -> set[Node]:
    """Return the cross-attentions of a decoder: attentions whose keys do not depend on the decoder's inputs; none
    without encoder inputs. Raise WeftError if an attention has no operand, not even its queries, that depends on them.
    """
    if HIDDEN not in graph.inputs:
        return set()
    ours = {v for name, v in graph.inputs.items() if name not in (HIDDEN, MASK)}
    crosses = set()
    for node in graph.nodes:
        if not ours.isdisjoint(node.inputs):
            ours.update(node.outputs)
        elif node.op in (ops.attention, ops.relative_attention):
            raise WeftError(
                f"target transformers passes decoders hidden states only, not %{node.output.name} of the encoder"
            )
        if node.op in (ops.attention, ops.relative_attention) and node.required_operand("k") not in ours:
            crosses.add(node)
    return crosses


def get_first_operand(node: Node) -> Value:
    """Return the first operand of `node`; an AssertionError if it is None."""
    value = node.inputs[0]
    assert value is not None
    return value


def find_param(value: Value) -> Value:
    """Return the first trained parameter that a node reads on the way back from `value` along first operands, within
    the scope of `value`; `value` itself without one."""
    current, scope = value, value.producer.scope if value.producer else ""
    while current.producer is not None and current.producer.scope == scope:
        for operand in current.producer.inputs:
            if isinstance(operand, Param) and not operand.recipe.is_constant:
                return operand
        if (first := current.producer.inputs[0]) is None:
            break
        current = first
    return value


def has_shared_weights(graph: Graph, cached: set[Node]) -> bool:
    """Return whether two of the nodes `cached` have the same op, weight and scope: then layers share weights."""
    seen: set[tuple[object, ...]] = set()
    for node in graph.nodes:
        if node in cached:
            key = node.op, node.scope, find_param(get_first_operand(node))
            if key in seen and isinstance(key[2], Param):
                return True
            seen.add(key)
    return False


def is_only_embedded(graph: Graph, ids: Value) -> bool:
    """Return whether one embedding is the only reader of the token ids `ids`, except iotas, which read the shape."""
    return [node.op for node, _ in ids.uses if node.op is not ops.iota] == [ops.embedding]


Lower = Callable[[HFEmitter, Node], "Operand | None"]
OVERRIDES: dict[Op, Lower] = {}


def hf_lowering(*ops: Op) -> Callable[[Lower], Lower]:
    """Register a lowering of `ops` for transformers. Where it returns None, that of target torch is used."""

    def register(lower: Lower) -> Lower:
        OVERRIDES.update(dict.fromkeys(ops, lower))
        return lower

    return register
