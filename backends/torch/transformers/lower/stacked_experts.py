"""Lower mixtures of experts to a module with stacked weights, which is called with the chosen experts of each token."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Node, Param
from weft.ir.recipes import Concat, Recipe, Slice, Source
from weft.ir.types import TensorType

from ...ops.elementwise import format_number, write_activation
from ...program.statements import Operand, Submodule, Var
from .lower_embeddings import MODULES
from .model_emitter import HFEmitter, hf_lowering


@hf_lowering(ops.moe)
def _lower_moe(e: HFEmitter, node: Node) -> Operand:
    x, combine, up = node.required_operand("x"), node.required_operand("combine"), node.required_operand("up")
    active = e.attr(node, "active") or e.size_of(up, 0)
    home = get_experts_path(node)
    stacks = _stack_weights(node)
    for name, param in stacks.items():
        e.program.weights[f"{home}.{name}"] = Param(param.graph, f"{home}.{name}", param.type, param.recipe)
    e.experts[home] = kind = e.add_function("Experts", _write_experts_class(e, node))
    leaf = Submodule(home, f"{kind}(config)", tuple(stacks))
    flat: list[Operand] = [e[x], e[combine]]
    if len(x.shape) == 3:
        flat = [e.emit("{0}.flatten(0, 1)", o, name=n) for o, n in zip(flat, ("tokens", "combine"), strict=True)]
    weights, index = e.emit_tuple(f"{{0}}.topk({active})", flat[1], names=("top_k_weights", "top_k_index"))
    y: Var = e.emit("{3}({0}, {1}, {2})", flat[0], index, weights, leaf, name="x")
    return e.emit("{0}.view_as({1})", y, x, name="x") if len(x.shape) == 3 else y


def get_experts_path(node: Node) -> str:
    """Return the module path of the experts of `node` (op moe): the module that has all their weights, if there is one
    in the scope of `node`, else ``experts`` in that scope."""
    homes = {v.name.rpartition(".")[0] for v in node.inputs[2:] if v is not None}
    (home, *rest) = homes
    inside = home.startswith(f"{node.scope}.") if node.scope else bool(home)
    return home if not rest and inside else f"{node.scope}.experts" if node.scope else "experts"


def _stack_weights(node: Node) -> dict[str, Param]:
    """Return name (as in transformers) → stacked weight or bias of `node` (op moe); gate_up_proj is gate, then up."""
    stacks: dict[str, Param] = {}
    for ending in ("", "_bias"):
        up, down, gate = (node.operand(f"{name}{ending}") for name in ("up", "down", "gate"))
        if isinstance(up, Param) and gate is None:
            stacks[f"up_proj{ending}"] = up
        elif isinstance(up, Param) and isinstance(gate, Param):
            experts, hidden, *rest = up.shape
            kind = TensorType(up.type.dtype, (experts, 2 * hidden, *rest))
            stacks[f"gate_up_proj{ending}"] = Param(up.graph, "", kind, Concat((gate.recipe, up.recipe), 1))
        if isinstance(down, Param):
            stacks[f"down_proj{ending}"] = down
    return stacks


def make_stack_recipes(node: Node, home: str) -> dict[str, Recipe]:
    """Return operand name (up, gate_bias, …) → recipe that reads it from the stacked weights of `node` at `home`."""
    recipes: dict[str, Recipe] = {}
    for ending in ("", "_bias"):
        up, gate = node.operand(f"up{ending}"), node.operand(f"gate{ending}")
        if up is not None and gate is not None:
            hidden, gate_up = up.shape[1], Source(f"{home}.gate_up_proj{ending}")
            recipes[f"gate{ending}"] = Slice(gate_up, 1, 0, hidden)
            recipes[f"up{ending}"] = Slice(gate_up, 1, hidden, 2 * hidden)
        elif up is not None:
            recipes[f"up{ending}"] = Source(f"{home}.up_proj{ending}")
        if node.operand(f"down{ending}") is not None:
            recipes[f"down{ending}"] = Source(f"{home}.down_proj{ending}")
    return recipes


def _write_experts_class(e: HFEmitter, node: Node) -> str:
    """Return the source of the experts' class of `node`, with the placeholder ``{name}`` for its name."""
    a, gated, biased = node.attrs, node.operand("gate") is not None, node.operand("up_bias") is not None
    up = node.required_operand("up")
    experts, hidden, dim = e.shape_of(up)
    first, wide = ("gate_up_proj", f"2 * {hidden}") if gated else ("up_proj", f"{hidden}")
    shapes = {first: f"{experts}, {wide}, {dim}", "down_proj": f"{experts}, {dim}, {hidden}"}
    if biased:
        shapes |= {f"{first}_bias": f"{experts}, {wide}", "down_proj_bias": f"{experts}, {dim}"}
    act = MODULES.get(a["activation"], "")
    special = a["limit"] is not None or a["shift"] != 0 or not act
    options = ", ".join(f"{k}={v}" for k, v in (("has_gate", False),) * (not gated) + (("has_bias", True),) * biased)
    even = all(isinstance(n, int) and n % 8 == 0 for n in up.shape[1:])  # grouped GEMM needs rows of 16 bytes
    decorated = [f"@use_experts_implementation({options})" if options else "@use_experts_implementation"]
    lines = [
        *(decorated if even else []),
        "class {name}(nn.Module):",
        f'    """Feed-forwards with stacked weights: {first} [experts, {"2 · " * gated}hidden, dim],',
        '    down_proj [experts, dim, hidden]."""',
        "",
        "    def __init__(self, config: Any) -> None:",
        "        super().__init__()",
        f"        self.num_experts = {experts}",
        *(f"        self.{name} = nn.Parameter(torch.empty({shape}))" for name, shape in shapes.items()),
        *([f"        self.act_fn = {act}"] if act else []),
    ]
    if special:
        lines += _write_gate_method(e, node, gated)
    bias = (f", self.{first}_bias[expert]", ", self.down_proj_bias[expert]") if biased else ("", "")
    opened = f"F.linear(hidden_states[token], self.{first}[expert]{bias[0]})"
    between = [f"            x = {'self._apply_gate' if gated else 'self.act_fn'}({opened})"]
    if gated and not special:
        between = [f"            gate, up = {opened}.chunk(2, -1)", "            x = self.act_fn(gate) * up"]
    return "\n".join(
        [
            *lines,
            "",
            "    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:",
            '        """Return Σ_k w_k · expert_k(x): hidden_states [tokens, dim], experts and weights [tokens, k]."""',
            "        y = torch.zeros_like(hidden_states)",
            "        for expert in range(self.num_experts):",
            "            token, place = (top_k_index == expert).nonzero(as_tuple=True)",
            *between,
            f"            x = F.linear(x, self.down_proj[expert]{bias[1]})",
            "            y = y.index_add(0, token, (x * top_k_weights[token, place, None]).to(y.dtype))",
            "        return y",
        ]
    )


def _write_gate_method(e: HFEmitter, node: Node, gated: bool) -> list[str]:
    """Return the lines of a method for options without a torch module: `_apply_gate` if `gated`, else `act_fn`."""
    limit, shift, act = e.attr(node, "limit"), node.attrs["shift"], write_activation(node.attrs["activation"])
    if not gated:
        return ["", "    def act_fn(self, x: Tensor) -> Tensor:", f"        return {act.format('x')}"]
    lines = ["", "    def _apply_gate(self, gate_up: Tensor) -> Tensor:", "        gate, up = gate_up.chunk(2, -1)"]
    if limit is not None:
        most = str(limit).replace("config.", "self.config.")
        lines.append(f"        gate, up = gate.clamp(max={most}), up.clamp(-{most}, {most})")
    up = "up" if shift == 0 else f"(up + {format_number(shift)})"
    return [*lines, f"        return {act.format('gate')} * {up}"]
