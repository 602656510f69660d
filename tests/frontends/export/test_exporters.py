"""The parts of exporting: recipes read backwards, graphs compared, and what the command says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from weft.frontends import load_source
from weft.frontends.app.api.export import export
from weft.frontends.app.cli import cli
from weft.frontends.dsl import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE
from weft.frontends.dsl.blocks import ARRANGEMENTS
from weft.frontends.export.gguf import keys
from weft.frontends.export.hf.configs import list_families
from weft.frontends.export.infer_settings import infer_settings
from weft.frontends.export.inversion import ShapedRecipe, invert_recipes
from weft.frontends.export.matching import match_graphs
from weft.frontends.models.families import FAMILIES
from weft.ir import Graph, MemoryReader, Recipe, TensorType, WeftError, ops
from weft.ir.recipes import Add, Cast, Concat, Full, Map, MeanPool, Permute, Reshape, Scale, Slice, Source, Take
from weft.ir.types import dtypes, sizes
from weft.passes import run_passes
from weft.passes.forms import canonicalize

from ..command import WATCHDOG, start
from ..conftest import Save

# -- recipes read backwards

S = Source("stored")
READ: dict[str, tuple[tuple[int, ...], list[Recipe]]] = {
    "as it is": ((6, 4), [S]),
    "turned": ((6, 4), [Permute(S, (1, 0))]),
    "rows of three": ((6, 4), [Slice(S, 0, 0, 2), Slice(S, 0, 2, 3), Slice(S, 0, 3, 6)]),
    "columns of one that is turned": ((6, 4), [Slice(Permute(S, (1, 0)), 0, 0, 3), Slice(Permute(S, (1, 0)), 0, 3, 4)]),
    "grouped": (
        (6, 4),
        [
            Reshape(Slice(Reshape(S, (2, 3, -1)), 1, 0, 1), (2, -1)),
            Reshape(Slice(Reshape(S, (2, 3, -1)), 1, 1, 3), (4, -1)),
        ],
    ),
    "pairs apart": ((8, 3), [Reshape(Permute(Reshape(S, (2, 2, 2, -1)), (0, 2, 1, 3)), (8, -1))]),
    "every other": ((6, 4), [Slice(S, 0, 0, 6, 2), Slice(S, 0, 1, 6, 2)]),
    "every other column": ((3, 6), [Slice(S, 1, 0, 6, 2), Slice(S, 1, 1, 6, 2)]),
    "shuffled": ((4, 2), [Take(S, (2, 0, 3, 1))]),
    "shifted": ((4,), [Add((S,), 1.0)]),
    "scaled": ((4,), [Scale(S, -0.5)]),
    "of a logarithm": ((4,), [Map(Map(S, "exp"), "neg")]),
    "rounded before": ((4,), [Cast(S, "f32")]),
}


@pytest.mark.parametrize("name", READ)
def test_recipes_are_undone(name: str, rng: np.random.Generator) -> None:
    """A recipe reads from the restored tensor what it read from the original, whatever the tensor."""
    shape, recipes = READ[name]
    stored = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    reader = MemoryReader({"stored": stored})
    values = {f"v{i}": recipe.evaluate(reader) for i, recipe in enumerate(recipes)}
    wanted = [(r, ShapedRecipe(Source(n), v.shape)) for r, (n, v) in zip(recipes, values.items(), strict=True)]
    found = invert_recipes(wanted)["stored"]
    got = found.recipe.evaluate(MemoryReader(values))
    assert (found.shape, got.shape) == (shape, shape)
    np.testing.assert_allclose(got, stored, rtol=1e-6)
    if not any(recipe.has(Add, Scale, Map) for recipe in recipes):
        assert np.array_equal(got, stored)


def test_several_tensors_and_known_shapes(rng: np.random.Generator) -> None:
    heads = [rng.standard_normal(3) for _ in range(2)]
    recipes = Concat((Source("head.0"), Source("head.1"))), Reshape(Source("flat"), (-1,))
    values = {"a": np.concatenate(heads), "b": rng.standard_normal(6)}
    wanted = [(r, ShapedRecipe(Source(n), (6,))) for r, n in zip(recipes, values, strict=True)]
    found = invert_recipes(wanted, lambda key, count: (2, 3) if key == "flat" else None)
    reader = MemoryReader(values)
    assert [found[f"head.{i}"].recipe.evaluate(reader).tolist() for i in range(2)] == [h.tolist() for h in heads]
    assert np.array_equal(found["flat"].recipe.evaluate(reader), values["b"].reshape(2, 3))


STORED = {"a": (5, 3), "b": (2, 3), "taps": (7, 1, 4), "by": (7,)}


@pytest.mark.parametrize(
    "recipe",
    [
        Concat((Source("a"), Source("b"))),
        Reshape(Source("taps"), (7, -1)),
        Add((Concat((Source("a"), Source("b"))), Reshape(Slice(Source("taps"), 2, 0, 3), (7, 3)))),
        Scale(Concat((Source("a"), Source("b"))), Source("by")),
    ],
    ids=["of several lengths", "of a known rank", "with other terms", "with factors"],
)
def test_known_tensors(recipe: Recipe, rng: np.random.Generator) -> None:
    """Parts have the lengths they have; terms and factors beside what takes the change stay as they are stored."""
    tensors = {key: rng.uniform(0.5, 1.5, shape) for key, shape in STORED.items() if key in recipe.sources()}
    value = rng.standard_normal(recipe.shape(MemoryReader(tensors)))
    found = invert_recipes([(recipe, ShapedRecipe(Source("value"), value.shape))], shapes=STORED)
    reader = MemoryReader(tensors | {"value": value})
    made = {key: tensor.recipe.evaluate(reader) for key, tensor in found.items()}
    assert {key: array.shape for key, array in made.items()} == {key: array.shape for key, array in tensors.items()}
    np.testing.assert_allclose(recipe.evaluate(MemoryReader(made)), value, rtol=1e-6, atol=1e-6)


def test_parts_of_unknown_lengths() -> None:
    with pytest.raises(WeftError, match="the sizes of a, b, which the model concatenates, are unknown"):
        invert_recipes([(Concat((Source("a"), Source("b"))), ShapedRecipe(Source("value"), (7, 3)))])


def test_what_was_added_by_recipe_goes_without_rounding() -> None:
    """1 + (w − 1) is not w in f32: from a family that adds 1 to one that does, the tensor stays what it is."""
    (found,) = invert_recipes([(Add((S,), 1.0), ShapedRecipe(Add((Source("theirs"),), 1.0), (4,)))]).values()
    assert found.recipe == Source("theirs")


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ([(MeanPool(S, 4, 2), (4, 2))], "the recipe mean_pool, which reads stored, has no inverse"),
        ([(Slice(S, 0, 1, 3), (2, 2))], "the slices of stored do not cover it"),
        ([(Slice(S, 0, 0, 4, 2), (2, 2))], "the slices of stored do not cover it"),
        ([(S, (2, 2)), (S, (2, 2))], "parameters that read tensor 'stored' have different values"),
    ],
)
def test_what_cannot_be_undone_is_said(wanted: list[Any], told: str) -> None:
    pairs = [(recipe, ShapedRecipe(Full(float(i), shape), shape)) for i, (recipe, shape) in enumerate(wanted)]
    with pytest.raises(WeftError, match=told):
        invert_recipes(pairs)


# -- graphs compared


def decoder(**changes: Any) -> Graph:
    attention = {"heads": 4, "kv_heads": 2, "rope": RoPE(), **changes.pop("attention", {})}
    norm = changes.pop("norm", RMSNorm())
    ffn = changes.pop("ffn", GatedMLP(24))
    block = Block(Attention(**attention), ffn, norm, **changes.pop("block", {}))
    return Decoder(vocab=17, dim=16, layers=changes.pop("layers", 2), block=block, **changes).graph()


def weighted(graph: Graph) -> Graph:
    """`graph` with weights that come from a checkpoint, as a family's do."""
    for name, param in graph.params.items():
        if not param.recipe.is_constant:
            param.recipe = Source(name)
    return graph


def differences(ours: Graph, theirs: Graph) -> list[tuple[str, str, str]]:
    found = match_graphs(canonicalize(ours), canonicalize(weighted(theirs)))
    return [(d.at, d.ours, d.theirs) for d in found.differences]


@pytest.mark.parametrize("pipeline", ["dce", "pack-qkv, pack-gate-up", "fuse-residual-norm", "fuse-norm-linear, cse"])
def test_fused_graphs_are_the_same(pipeline: str) -> None:
    assert differences(run_passes(decoder(), pipeline), decoder()) == []


def test_what_is_missing_is_neutral() -> None:
    """Norms without weights and linears without biases stand for ones and zeros; what is there besides does not."""
    plain, whole = decoder(norm=RMSNorm(weight=False)), decoder(attention={"qkv_bias": True})
    found = match_graphs(canonicalize(plain), canonicalize(weighted(whole)))
    assert found.differences == []
    assert (found.params["layers.0.attn_norm.weight"], found.params["final_norm.weight"]) == (1.0, 1.0)
    told = differences(whole, decoder())
    assert told[0] == ("layers.0.attn.q", "a bias", "no bias") and len(told) == 6


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention": {"window": 3}}, ("layers.0.attn.attention", "window=3", "window=none")),
        ({"attention": {"scale": 0.3}}, ("layers.0.attn.attention", "scale=0.3", "scale=0.5")),
        ({"attention": {"rope": RoPE(500.0)}}, ("rope.frequencies", "other values", "those of its rope.frequencies")),
        (
            {"attention": {"rope": RoPE(interleaved=True)}},
            ("layers.0.attn.q_rope", "interleaved=true", "interleaved=false"),
        ),
        ({"attention": {"rope": None}}, ("layers.0.attn.q_rope", "linear", "rope")),
        ({"norm": RMSNorm(1e-3)}, ("layers.0.attn_norm", "eps=0.001", "eps=1e-06")),
        ({"ffn": GatedMLP(24, "gelu")}, ("layers.0.ffn.glu", 'activation="gelu"', 'activation="silu"')),
        ({"ffn": GatedMLP(25)}, ("layers.0.ffn.gate.weight", "[25, 16]", "[24, 16]")),
        ({"tie_embeddings": True}, ("lm_head.weight", "", "")),
        ({"embed_scale": 3.0}, ("embed", "affine", "embedding")),
        ({"layers": 3}, ("embed", "add", "embedding")),
    ],
)
def test_differences_are_named_where_they_are(changes: dict[str, Any], told: tuple[str, str, str]) -> None:
    found = differences(decoder(**changes), decoder())
    if "tie_embeddings" in changes:  # a family without ties holds the table twice
        assert found == []
        assert differences(decoder(), decoder(**changes))[0][0] == "embed.weight"
    else:
        assert found[0] == told


def test_an_order_of_additions_is_no_difference() -> None:
    ours = decoder()
    for node in ours.nodes:
        if node.op is ops.add:
            a, b = node.inputs
            node.set_input(0, b), node.set_input(1, a)
    assert differences(ours, decoder()) == []


# -- families


def test_classes_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = {name: FAMILIES[name].transformers for name in list_families()}
    assert {name: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in classes} == classes


def test_the_plainest_family_is_proposed_first() -> None:
    families = """llama mistral qwen3 qwen2 gpt2 gpt_neox phi gemma gemma2 gemma3_text olmo2 olmo granite smollm3
        starcoder2 stablelm cohere gptj gpt_neo gpt_bigcode phi3 mixtral qwen3_moe qwen2_moe olmoe
        granitemoe bitnet arcee seed_oss helium glm glm4 ministral exaone4 olmo3 hunyuan_v1_dense
        ernie4_5 nemotron cwm internlm3 iquestcoder cohere2 persimmon codegen flex_olmo minimax_m2"""
    architectures = """llama qwen2 qwen3 gemma gemma2 gemma3 phi2 phi3 gpt2 gptneox starcoder2 stablelm olmo2 olmo
        granite smollm3 command-r qwen2moe qwen3moe olmoe granitemoe arcee seed_oss hunyuan-dense nemotron cohere2"""
    assert list_families() == families.split()
    assert keys.list_architectures(None) == (None, architectures.split())
    assert keys.list_architectures("gemma3_text")[1][:2] == ["gemma3", "llama"]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arrangements_are_read_off_a_graph(arrangement: str) -> None:
    assert infer_settings(canonicalize(decoder(block={"arrangement": arrangement}))).arrangement == arrangement


def test_settings_are_read_off_a_graph() -> None:
    graph = decoder(attention={"window": 5, "softcap": 3.0, "qk_norm": RMSNorm()}, block={"arrangement": "sandwich"})
    found = infer_settings(canonicalize(graph))
    assert (found.window, found.softcap, found.qk_norm, found.arrangement) == (5, 3.0, "head", "sandwich")
    assert (found.heads, found.kv_heads, found.head_dim, found.ffn, found.dim) == (4, 2, 4, 24, 16)


# -- the command


def weft_command(*args: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["export", *map(str, args)])
    return result.exit_code, result.stderr


def test_the_command(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2)
    (tmp_path / "steps.pipeline").write_text("pack-qkv  # undone\nsliding-window{size=8}\n")
    status, told = weft_command(folder, "-p", tmp_path / "steps.pipeline", "-o", tmp_path / "out")
    assert (status, told) == (0, f"weft: {tmp_path / 'out'} is a mistral model\n")
    assert load_source(tmp_path / "out").graph.meta["model_type"] == "mistral"
    status, told = weft_command(folder, "--format", "gguf", "--trace", "-p", "pack-qkv", "-o", tmp_path / "out.gguf")
    assert status == 0 and "pack-qkv" in told and told.endswith("out.gguf is a llama model\n")
    assert weft_command(folder, "--format", "safetensors", "-o", tmp_path / "out.safetensors") == (0, "")


def test_the_name_says_the_format(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2)
    assert weft_command(folder, "-o", tmp_path / "a.gguf")[0] == 0
    assert (tmp_path / "a.gguf").read_bytes()[:4] == b"GGUF"
    assert weft_command(folder, "-o", tmp_path / "A.SafeTensors") == (0, "")
    assert "embed.weight" in load_file(tmp_path / "A.SafeTensors")
    for name in ("Llama-2.5", "b.gguf/"):  # no such suffix; the name of a folder
        assert weft_command(folder, "-o", f"{tmp_path}/{name}")[0] == 0
        assert (tmp_path / name / "config.json").is_file()
    assert export(folder, tmp_path / "b.gguf") == "llama"  # a folder that is there is replaced by one
    assert (tmp_path / "b.gguf" / "config.json").is_file()


def test_the_command_refuses_in_one_line(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2)
    (tmp_path / "file").write_text("mine")
    for args, words in (
        (("--format", "onnx", "-o", tmp_path / "out"), "unknown format 'onnx'; weft exports hf, safetensors, gguf"),
        (
            ("-o", tmp_path / "a.gguf", "--format", "hf"),
            "has the suffix of a gguf file, but --format hf writes a folder",
        ),
        (("-o", tmp_path / "a.safetensors", "--format", "gguf"), "but --format gguf writes a .gguf file"),
        (
            ("-o", tmp_path / "a.onnx"),
            "`weft compile` writes ONNX; name a folder, or a .gguf",
        ),
        (("-o", tmp_path / "file"), "a file with that name is in the way"),
        (("-o", folder), f"{folder}: it holds the source"),
        (("-o", "/proc/out"), "cannot write to /proc/out"),
        (("-o", tmp_path / "out", "-p", "kv-cache"), "export it before kv-cache"),
        (("-o", tmp_path / "out", "-p", "kv-cache, last-token-logits"), "export it before kv-cache"),
        (("-o", tmp_path / "out", "-p", "@gone"), "the pipeline file gone cannot be read: no such file or directory"),
        (("-o", tmp_path / "out", "--dtype", "q8_0"), "a checkpoint cannot be written in q8_0"),
        (("-o", tmp_path / "out", "-p", "sliding-window{size=3, keep_first=1}"), "which has keep_first=0 at"),
    ):
        status, told = weft_command(folder, *args)
        assert status == 2 and told.startswith("weft: error: ") and told.count("\n") == 1
        assert words in told
    assert {p.name for p in tmp_path.iterdir()} == {"model", "file"}
    assert weft_command("nowhere", "-o", tmp_path / "out")[0] == 2


@pytest.mark.parametrize("kind", ["folder", "hf", "gguf", "safetensors"])
def test_a_disk_that_fills_up_is_one_line(kind: str, save: Save, tmp_path: Path) -> None:
    """Of files that may not grow as large as the weights, nothing is left."""
    _, folder = save("llama", num_key_value_heads=2)
    verb = ["opt"] if kind == "folder" else ["export", "--format", kind]
    process = start(*verb, folder, "-o", tmp_path / "out", cwd=tmp_path, largest=20_000)
    _, told = process.communicate(timeout=WATCHDOG)
    assert process.returncode == 2
    assert told.startswith(f"weft: error: cannot write to {tmp_path / 'out'}: ") and told.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_what_a_pass_did_not_do_is_told(save: Save, tmp_path: Path) -> None:
    _, folder = save("llama", num_key_value_heads=2)
    status, told = weft_command(folder, "-p", "pack-qkv, pack-qkv", "-o", tmp_path / "out")
    assert status == 0 and "pack-qkv" in told.splitlines()[0]


def test_ops_of_any_number_of_operands() -> None:
    """No operand is skipped."""

    def joined(count: int) -> Graph:
        graph = Graph()
        x = graph.add_input("x", TensorType(dtypes.f32, (sizes.sym("batch"), 4)))
        graph.add_output("y", ops.concat(*[x] * count, axis=0))
        return graph

    (told,) = match_graphs(joined(3), joined(2)).differences
    assert (told.ours, told.theirs) == ("3 operands", "2 operands")
    assert match_graphs(joined(2), joined(2)).differences == []
