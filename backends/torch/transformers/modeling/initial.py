"""The method ``_init_weights``, which gives weights the initial values that an architecture declares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from weft.ir.graph import Param
from weft.ir.recipes import Concat, Full, Map, Normal, Recipe, Uniform

from ...codegen.method_writer import write_attribute
from ...codegen.structure import Method
from ...program.statements import Submodule, relative_to

DEFAULT_STD = 0.02  # the default of transformers


def find_usual_std(weights: Iterable[Param]) -> float:
    """Return the most common standard deviation of the `weights` with normal initial values; 0.02 without any."""
    deviations = Counter(p.recipe.std for p in weights if isinstance(p.recipe, Normal))
    return deviations.most_common(1)[0][0] if deviations else DEFAULT_STD


def write_init_lines(methods: Mapping[str, Method], weights: Mapping[str, Param], usual: float) -> list[str]:
    """Return the lines of ``_init_weights`` for weights whose initial values are not the default of transformers.
    methods: class name → its forward. weights: path → parameter. usual: the most common standard deviation."""
    lines = []
    for name, method in methods.items():
        class_lines: list[str] = []
        for path, member in method.members.items():
            local = write_attribute("module", relative_to(path, method.path))
            if isinstance(member, Submodule):
                parts = {
                    f"{local}.{leaf}": (weights.get(f"{path}.{leaf}"), _get_default(member, leaf, usual))
                    for leaf in member.tensors
                }
            else:
                parts = {local: (None if member.constant else weights.get(path), None)}
            for place, (param, default) in parts.items():
                text = None if param is None else _write_initializer(param, usual)
                if text is not None and text != default:
                    class_lines.append(f"    init.{text.format(place)}")
        if class_lines:
            lines += [f"if isinstance(module, {name}):", *class_lines]
    return lines


def write_expert_lines(experts: Mapping[str, str], weights: Mapping[str, Param], usual: float) -> list[str]:
    """Return the lines of ``_init_weights`` for stacked weights of experts; `experts` is {module path: class name}.

    `weights` are the parameters by their keys in the state_dict. `usual` is the standard deviation of matrices that are
    read from a checkpoint.
    """
    lines = []
    for kind in dict.fromkeys(experts.values()):
        home = next(path for path, name in experts.items() if name == kind)
        stacks = {k.rpartition(".")[2]: p for k, p in weights.items() if k.startswith(f"{home}.")}
        lines.append(f"if isinstance(module, {kind}):")
        lines += [
            f"    init.{_write_initializer(p, usual) or 'zeros_({})'}".format(f"module.{name}")
            for name, p in stacks.items()
        ]
    return lines


def _get_default(module: Submodule, leaf: str, usual: float) -> str | None:
    """Return the call of transformers' default initialization for the weight `leaf` of `module`; None without one."""
    kind = module.init.partition("(")[0]
    if kind in ("nn.Linear", "nn.Embedding", "ScaledEmbedding"):
        return f"normal_({{}}, std={usual!r})" if leaf == "weight" else "zeros_({})"
    if kind in ("nn.RMSNorm", "nn.LayerNorm"):
        return "ones_({})" if leaf == "weight" else "zeros_({})"
    return None


def _write_initializer(param: Param, usual: float) -> str | None:
    """Return the source of a call of `transformers.initialization` for the weight ``{}``. Values read from a checkpoint
    have no known initialization: a matrix is normal with deviation `usual`, and for a vector None is returned."""
    recipe = param.recipe
    parts = recipe.parts if isinstance(recipe, Concat) else (recipe,)
    normal = {(p.std, p.mean) if isinstance(p, Normal) else None for p in parts}
    if len(normal) == 1 and (shared := normal.pop()) is not None:  # a normal distribution, also of all parts
        std, mean = shared
        return f"normal_({{}}{f', mean={mean!r}' if mean else ''}, std={std!r})"
    match recipe:
        case Uniform():
            return f"uniform_({{}}, {recipe.low!r}, {recipe.high!r})"
        case Full(value=0.0):
            return "zeros_({})"
        case Full(value=1.0):
            return "ones_({})"
        case Full():
            return f"constant_({{}}, {recipe.value!r})"
    if (values := _write_values(recipe)) is not None:
        return f"copy_({{0}}, {values})"
    # Read from a checkpoint: its values before training are unknown.
    return f"normal_({{}}, std={usual!r})" if len(param.shape) > 1 else None


FUNCTIONS = {"exp": "{}.exp()", "log": "{}.log()", "neg": "-{}", "inverse_softplus": "{}.expm1().log()"}


def _write_values(recipe: Recipe) -> str | None:
    """Return the source of initial values with the shape of ``{0}``; None for a recipe that cannot be written so."""
    match recipe:
        case Uniform():
            return f"torch.empty_like({{0}}).uniform_({recipe.low!r}, {recipe.high!r})"
        case Normal():
            return f"torch.empty_like({{0}}).normal_({recipe.mean!r}, {recipe.std!r})"
        case Map() if recipe.fn in FUNCTIONS and (inner := _write_values(recipe.item)) is not None:
            return FUNCTIONS[recipe.fn].format(inner)
        case Concat() if all(isinstance(p, Full) and p.value == i + 1 for i, p in enumerate(recipe.parts)):
            return "torch.arange(1.0, 1 + {0}.shape[-1]).expand_as({0})"
    return None
