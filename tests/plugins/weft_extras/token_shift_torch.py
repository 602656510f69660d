"""A lowering of token_shift to PyTorch, which keeps its state."""

from weft.backends.torch.ops.calls import FunctionCall
from weft.backends.torch.ops.recurrent import PAST, emit_recurrence
from weft.backends.torch.program.emitter import Emitter
from weft.backends.torch.program.registry import lowering
from weft.backends.torch.program.statements import Var
from weft.ir import Node

from .token_shift import token_shift

SHIFTED = '''
def shifted(x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tokens before x [batch, seq, width], of which `past` is the first, and the last of x."""
    return torch.cat((torch.zeros_like(x[:, :1]) if past is None else past, x[:, :-1]), 1), x[:, -1:]
'''


@lowering(token_shift)
def _token_shift(e: Emitter, node: Node) -> tuple[Var, ...]:
    function = e.add_function("shifted", SHIFTED)
    return emit_recurrence(e, node, FunctionCall(function).add(node.required_operand("x"), PAST))
