"""Lower a graph to two programs: a base model that computes hidden states, and a head that computes logits."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import Trait
from weft.passes.library.target.sides import DECODER, ENCODER

from ....target import MODEL
from ...codegen.structure import group_statements
from ...lower.lower import emit_nodes, find_read_weights, select_live_statements
from ...program.statements import Program, Statement, Var
from ..config_fields.size_names import Fields, SizeNames
from . import attention_functions as attention
from . import lower_embeddings as dense
from . import stacked_experts as experts
from .attention_functions import finish_masks
from .model_emitter import HEAD, OVERRIDES, HFEmitter, get_first_operand

RESERVED_ATTRIBUTES = (  # names that transformers uses, so modules of a model must not
    *("config", "layer_idx", "is_causal", "scaling", "num_key_value_groups", "device", "dtype", "base_model", "model"),
    *("generation_config", "loss_function", "loss_type", "framework", "name_or_path", "warnings_issued", HEAD),
    *("main_input_name", "base_model_prefix", "gradient_checkpointing", "generate", "post_init", "num_experts"),
)
USUAL = ("embed=embed_tokens", "final_norm=norm")  # default plans of transformers contain the right-hand names
REGISTERED = (attention, dense, experts)  # modules whose import registers lowerings


@dataclass
class LoweredModel:
    """A model, or the decoder or encoder of an encoder-decoder, lowered to the programs of its base model and its head.

    full_graph: the model. graph: the lowered part. side: "decoder" or "encoder" of an encoder-decoder, else "".
    head: None without logits. hidden: the base model's last hidden states. fields: the config fields of all sides.
    masks: source of the function that computes the masks of all layers; "" if a function of transformers does.
    """

    full_graph: Graph
    graph: Graph
    side: str
    base: Program
    head: Program | None
    hidden: Var
    fields: Fields
    emitter: HFEmitter
    masks: str

    @property
    def names(self) -> dict[str, str]:
        """Map the names of the parameters of `graph` to their names in `full_graph`."""
        within = {name: f"{self.side}.{name}" for name in self.graph.params}
        return {name: path if path in self.full_graph.params else name for name, path in within.items()}

    @property
    def tied_keys(self) -> dict[str, str]:
        """Map the key of each head weight that the base model also has to its key in the base model."""
        weights = {} if self.head is None else self.head.weights
        return {k: name for k, p in weights.items() for name, weight in self.base.weights.items() if weight is p}


def lower_sides(forms: Mapping[str, Graph]) -> list[LoweredModel]:
    """Return the lowered graphs of `forms` (see `TransformersFolder`): [model], or [decoder, encoder] if given."""
    fields = Fields()
    sides: list[LoweredModel] = []
    for side in [side for side in (DECODER, ENCODER) if side in forms] or [""]:
        fields.side = side
        functions = sides[0].emitter.program.functions if sides else {}
        inlined = _lower_side(forms, side, fields, functions)
        sides.append(_lower_side(forms, side, fields, functions, True) if _has_unlike_attentions(inlined) else inlined)
    return sides


def _lower_side(
    forms: Mapping[str, Graph], side: str, fields: Fields, functions: Mapping[str, str], separate: bool = False
) -> LoweredModel:
    model, graph = forms[MODEL], forms[side or MODEL]
    hidden, head = _find_head(graph)
    e = HFEmitter(graph, SizeNames(graph, fields), fields, head, side, separate)
    e.program.functions |= functions
    emit_nodes(e, graph, OVERRIDES)
    outputs = {name: e[value] for name, value in graph.outputs.items()}
    states, masks = e[hidden], finish_masks(e)
    if not isinstance(states, Var):
        raise WeftError(f"target transformers needs hidden states, and the output of {graph.name} is a weight")
    new = {name: text for name, text in e.program.functions.items() if name not in functions}
    base = Program(graph.name, e.program.inputs, outputs, e.program.statements, functions=new)
    above = None
    if "task" in graph.meta:
        above = _split_task_head(base, states, e)
    elif head is not None:
        states.name = "hidden_states"
        logits = {"logits": outputs["logits"]}
        above = Program(graph.name, [states], logits, _select_downstream(base.statements, states))
        base.statements = [s for s in base.statements if s not in above.statements]
        base.outputs = {"last_hidden_state": states, **{k: v for k, v in outputs.items() if k == "aux_loss"}}
    base.statements = select_live_statements(base)
    for program in filter(None, (base, above)):
        program.weights = {k: p for k, p in e.program.weights.items() if k in find_read_weights(program)}
        program.nodes = [n for n in graph.nodes if any(s.node is n for s in program.statements)]
    return LoweredModel(model, graph, side, base, above, states, fields, e, masks)


def _split_task_head(base: Program, hidden: Var, e: HFEmitter) -> Program:
    """Return the head of a graph with a task: the statements of `base` after the hidden states `hidden` and the pooler.
    Rename the variables that it may read, and remove its outputs from `base`, in place."""
    cut = {hidden: "hidden_states", e.attention_mask: "attention_mask", e.arguments["input_ids"]: "input_ids"}
    outputs = base.outputs
    pooled = outputs.get("pooler_output")
    if isinstance(pooled, Var):
        cut[pooled] = "pooler_output"
    for var, name in cut.items():
        var.name = name
    scores = {name: o for name, o in outputs.items() if name not in ("last_hidden_state", "pooler_output")}
    above = Program(base.name, [], scores, base.statements)
    above.statements = select_live_statements(above, cut)
    read = {o for s in above.statements for o in s.operands}
    above.inputs = [var for var in cut if var in read]
    base.outputs = {name: o for name, o in outputs.items() if name not in scores}
    return above


def _has_unlike_attentions(lowered: LoweredModel) -> bool:
    """Return whether attentions of one module class differ in scale, query heads per KV head, or causality. These are
    attributes of the module, so each attention must then be a module of its own."""
    attributes: dict[Hashable, tuple[str, str, bool]] = {}
    for method in group_statements(lowered.base).walk():
        for item in (i for i in method.items if isinstance(i, Statement) and i in lowered.emitter.attentions):
            values = lowered.emitter.attentions[item].module_attributes
            if attributes.setdefault(method.key, values) != values:
                return True
    return False


def _find_head(graph: Graph) -> tuple[Value, Node | None]:
    """Return (hidden states of the base model, the linear map to logits). The map is None without logits, and for tasks
    other than fill-mask. Raise WeftError if logits are not an elementwise function of a linear map's result."""
    value, task = graph.outputs.get("logits"), graph.meta.get("task")
    if value is None or task is not None:
        node = value.producer if value is not None and task == "fill-mask" else None  # it may be tied
        return graph.outputs.get("last_hidden_state") or next(iter(graph.outputs.items()))[1], node
    while value.producer is not None and value.producer.op is not ops.linear:
        if Trait.ELEMENTWISE not in value.producer.op.traits:
            break
        value = get_first_operand(value.producer)
    node = value.producer
    if node is None or node.op is not ops.linear or not isinstance(weight := node.operand("weight"), Param):
        raise WeftError(f"target transformers needs logits of a linear map; {graph.name} has others: use target torch")
    assert weight.type.rank == 2
    return node.required_operand("x"), node


def _select_downstream(statements: Sequence[Statement], source: Var) -> list[Statement]:
    dependent, downstream = {source}, []
    for s in statements:
        if not dependent.isdisjoint(o for o in s.operands if isinstance(o, Var)):
            dependent.update(s.results)
            downstream.append(s)
    return downstream
