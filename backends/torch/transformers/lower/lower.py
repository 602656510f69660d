"""From a graph to two programs: a base model that makes hidden states, and a head that makes logits of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import Trait
from weft.passes.library.target.sides import DECODER, ENCODER

from ....targets import MODEL
from ...codegen.structure import structure
from ...lower.lower import emit, live_statements, read_weights
from ...program.statements import Operand, Program, Statement, Var
from ..numbers.fields import Fields
from ..numbers.naming import Names
from . import attention, dense, experts, relative
from .emitter import HEAD, OVERRIDES, ShellEmitter, first_operand
from .masks import finish_masks

OWN = (  # names that classes of transformers have for themselves
    *("config", "layer_idx", "is_causal", "scaling", "num_key_value_groups", "device", "dtype", "base_model", "model"),
    *("generation_config", "loss_function", "loss_type", "framework", "name_or_path", "warnings_issued", HEAD),
    *("main_input_name", "base_model_prefix", "gradient_checkpointing", "generate", "post_init", "num_experts"),
)
USUAL = ("embed=embed_tokens", "final_norm=norm")  # transformers divides modules of these names among devices
REGISTERED = (attention, dense, experts, relative)  # what transformers computes in its own way


@dataclass
class Lowered:
    """A decoder or an encoder, alone or as a `side` of an encoder-decoder: the programs of its base model and of its
    head.

    `graph` is that of the side, `whole` that of the model. `hidden` is what the base model makes, and the head reads.
    `masks` is the function that makes the masks of all layers, "" if one of transformers does.
    """

    whole: Graph
    graph: Graph
    side: str
    base: Program
    head: Program | None
    hidden: Var
    fields: Fields
    emitter: ShellEmitter
    masks: str

    @property
    def names(self) -> dict[str, str]:
        """The names that parameters of the side have in the whole."""
        within = {name: f"{self.side}.{name}" for name in self.graph.params}
        return {name: path if path in self.whole.params else name for name, path in within.items()}

    @property
    def tied(self) -> dict[str, str]:
        """The weights of the head that are weights of its base model, by their names in both."""
        own = {} if self.head is None else self.head.weights
        return {k: name for k, p in own.items() for name, other in self.base.weights.items() if other is p}


def lower(forms: Mapping[str, Graph]) -> list[Lowered]:
    """Lower `forms`, those of the target: the model, or the decoder and the encoder that it is made of; their fields
    are one."""
    fields = Fields()
    found: list[Lowered] = []
    for side in [side for side in (DECODER, ENCODER) if side in forms] or [""]:
        fields.side = side
        functions = found[0].emitter.program.functions if found else {}
        one = _lower_side(forms, side, fields, functions)
        found.append(_lower_side(forms, side, fields, functions, True) if _unlike(one) else one)
    return found


def _lower_side(
    forms: Mapping[str, Graph], side: str, fields: Fields, functions: Mapping[str, str], apart: bool = False
) -> Lowered:
    whole, graph = forms[MODEL], forms[side or MODEL]
    hidden, head = _head(graph)
    e = ShellEmitter(graph, Names(graph, fields), fields, head, side, apart)
    e.program.functions |= functions
    emit(e, graph, OVERRIDES)
    outputs = {name: e[value] for name, value in graph.outputs.items()}
    made, masks = e[hidden], finish_masks(e)
    if not isinstance(made, Var):
        raise WeftError(f"{graph.name} makes no hidden states: its output is a weight")
    own = {name: text for name, text in e.program.functions.items() if name not in functions}
    if "task" in graph.meta:
        return _with_task(whole, graph, side, e, outputs, made, fields, masks, own)
    base = Program(graph.name, e.program.inputs, outputs, e.program.statements, functions=own)
    above = None
    if head is not None:
        made.name = "hidden_states"
        above = Program(graph.name, [made], {"logits": outputs["logits"]}, _downstream(base.statements, made))
        base.statements = [s for s in base.statements if s not in above.statements]
        base.outputs = {"last_hidden_state": made, **{k: v for k, v in outputs.items() if k == "aux_loss"}}
        above.weights = {k: p for k, p in e.program.weights.items() if k in read_weights(above)}
    base.statements = live_statements(base)
    base.weights = {k: p for k, p in e.program.weights.items() if k in read_weights(base)}
    for program in filter(None, (base, above)):
        program.nodes = [n for n in graph.nodes if any(s.node is n for s in program.statements)]
    return Lowered(whole, graph, side, base, above, made, fields, e, masks)


def _with_task(
    whole: Graph,
    graph: Graph,
    side: str,
    e: ShellEmitter,
    outputs: Mapping[str, Operand],
    hidden: Var,
    fields: Fields,
    masks: str,
    functions: dict[str, str],
) -> Lowered:
    """The model of a graph with a head: what makes its scores of the outputs of its base model is the head's."""
    cut = {hidden: "hidden_states", e.attention_mask: "attention_mask", e.given["input_ids"]: "input_ids"}
    pooled = outputs.get("pooler_output")
    if isinstance(pooled, Var):
        cut[pooled] = "pooler_output"
    for var, name in cut.items():
        var.name = name
    made = {name: o for name, o in outputs.items() if name not in ("last_hidden_state", "pooler_output")}
    above = Program(graph.name, [], made, e.program.statements)
    above.statements = live_statements(above, cut)
    read = {o for s in above.statements for o in s.operands}
    above.inputs = [var for var in cut if var in read]
    kept = {name: o for name, o in outputs.items() if name not in made}
    base = Program(graph.name, e.program.inputs, kept, e.program.statements, functions=functions)
    base.statements = live_statements(base)
    for program in (base, above):
        program.weights = {k: p for k, p in e.program.weights.items() if k in read_weights(program)}
        program.nodes = [n for n in graph.nodes if any(s.node is n for s in program.statements)]
    return Lowered(whole, graph, side, base, above, hidden, fields, e, masks)


def _unlike(lowered: Lowered) -> bool:
    """Return whether one class would stand for attentions that differ in what it holds of them."""
    known: dict[Hashable, tuple[str, str, bool]] = {}
    for method in structure(lowered.base).walk():
        for item in method.items:
            told = lowered.emitter.attending.get(item) if isinstance(item, Statement) else None
            if told is not None and known.setdefault(method.key, told.held) != told.held:
                return True
    return False


def _head(graph: Graph) -> tuple[Value, Node | None]:
    """Return what a base model makes, and the linear map that makes logits of it; None for a model without logits."""
    value, task = graph.outputs.get("logits"), graph.meta.get("task")
    if value is None or task is not None:
        node = value.producer if value is not None and task == "fill-mask" else None  # which may be tied
        return graph.outputs.get("last_hidden_state") or next(iter(graph.outputs.items()))[1], node
    while value.producer is not None and value.producer.op is not ops.linear:
        if Trait.ELEMENTWISE not in value.producer.op.traits:
            break
        value = first_operand(value.producer)
    if value.producer is None or not isinstance(weight := value.producer.operand("weight"), Param):
        raise WeftError(f"target transformers needs logits made by a linear map: those of {graph.name} are not")
    assert weight.type.rank == 2
    return value.producer.required("x"), value.producer


def _downstream(statements: Sequence[Statement], made: Var) -> list[Statement]:
    """The statements that read `made`, or what is made of it."""
    known, found = {made}, []
    for s in statements:
        if not known.isdisjoint(o for o in s.operands if isinstance(o, Var)):
            known.update(s.results)
            found.append(s)
    return found
