"""Initial values of weights, as an architecture declares them: the lines of ``_init_weights``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from weft.ir.graph import Param
from weft.ir.recipes import Concat, Full, Map, Normal, Recipe, Uniform

from ...codegen.method_writer import attribute
from ...codegen.structure import Method
from ...program.statements import Submodule, relative

RANGE = 0.02  # where nothing else is said, as everywhere in transformers


def initializer_range(weights: Iterable[Param]) -> float:
    """The deviation that most matrices are drawn with."""
    found = Counter(p.recipe.std for p in weights if isinstance(p.recipe, Normal))
    return found.most_common(1)[0][0] if found else RANGE


def initial_lines(methods: Mapping[str, Method], weights: Mapping[str, Param], usual: float) -> list[str]:
    """The lines for all weights whose initial values are not those that transformers gives their modules; `methods` are
    those of the classes."""
    lines = []
    for name, method in methods.items():
        own: list[str] = []
        for path, held in method.holds.items():
            local = attribute("module", relative(path, method.path))
            if isinstance(held, Submodule):
                parts = {
                    f"{local}.{leaf}": (weights.get(f"{path}.{leaf}"), _module_default(held, leaf, usual))
                    for leaf in held.holds
                }
            else:
                parts = {local: (None if held.constant else weights.get(path), None)}
            for place, (param, default) in parts.items():
                text = None if param is None else _drawn(param, usual)
                if text is not None and text != default:
                    own.append(f"    init.{text.format(place)}")
        if own:
            lines += [f"if isinstance(module, {name}):", *own]
    return lines


def experts_lines(experts: Mapping[str, str], weights: Mapping[str, Param], usual: float) -> list[str]:
    """The same for the stacked weights of mixtures, whose classes `experts` gives by path."""
    lines = []
    for kind in dict.fromkeys(experts.values()):
        home = next(path for path, name in experts.items() if name == kind)
        held = {k.rpartition(".")[2]: p for k, p in weights.items() if k.startswith(f"{home}.")}
        lines.append(f"if isinstance(module, {kind}):")
        lines += [f"    init.{_drawn(p, usual) or 'zeros_({})'}".format(f"module.{name}") for name, p in held.items()]
    return lines


def _module_default(held: Submodule, leaf: str, usual: float) -> str | None:
    """The initial values that transformers gives the weight `leaf` of a module."""
    kind = held.init.partition("(")[0]
    if kind in ("nn.Linear", "nn.Embedding", "ScaledEmbedding"):
        return f"normal_({{}}, std={usual!r})" if leaf == "weight" else "zeros_({})"
    if kind in ("nn.RMSNorm", "nn.LayerNorm"):
        return "ones_({})" if leaf == "weight" else "zeros_({})"
    return None


def _drawn(param: Param, usual: float) -> str | None:
    """A call of `transformers.initialization` that makes the initial values of a weight ``{}``."""
    recipe = param.recipe
    match recipe:
        case Normal():
            mean = f", mean={recipe.mean!r}" if recipe.mean else ""
            return f"normal_({{}}{mean}, std={recipe.std!r})"
        case Uniform():
            return f"uniform_({{}}, {recipe.low!r}, {recipe.high!r})"
        case Full(value=0.0):
            return "zeros_({})"
        case Full(value=1.0):
            return "ones_({})"
        case Full():
            return f"constant_({{}}, {recipe.value!r})"
    if isinstance(recipe, Concat) and (drawn := _drawn_parts(recipe)) is not None:
        return drawn
    made = _made(recipe)
    if made is not None:
        return f"copy_({{0}}, {made})"
    # Read from a checkpoint: what it was before training is not known.
    return f"normal_({{}}, std={usual!r})" if len(param.shape) > 1 else None


def _drawn_parts(recipe: Concat) -> str | None:
    """A call for parts that are drawn alike."""
    alike = {(p.std, p.mean) for p in recipe.parts if isinstance(p, Normal)}
    if len(alike) != 1 or not all(isinstance(p, Normal) for p in recipe.parts):
        return None
    ((std, mean),) = alike
    return f"normal_({{}}{f', mean={mean!r}' if mean else ''}, std={std!r})"


FUNCTIONS = {"exp": "{}.exp()", "log": "{}.log()", "neg": "-{}", "inverse_softplus": "{}.expm1().log()"}


def _made(recipe: Recipe) -> str | None:
    """An expression for initial values made by functions of others, of the shape of the weight ``{0}``."""
    match recipe:
        case Uniform():
            return f"torch.empty_like({{0}}).uniform_({recipe.low!r}, {recipe.high!r})"
        case Normal():
            return f"torch.empty_like({{0}}).normal_({recipe.mean!r}, {recipe.std!r})"
        case Map() if recipe.fn in FUNCTIONS and (inner := _made(recipe.item)) is not None:
            return FUNCTIONS[recipe.fn].format(inner)
        case Concat() if all(isinstance(p, Full) and p.value == i + 1 for i, p in enumerate(recipe.parts)):
            return "torch.arange(1.0, 1 + {0}.shape[-1]).expand_as({0})"
    return None
