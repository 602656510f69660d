"""Every option that is given is refused, or changes something that can be seen: files, the manifest, what is printed.

`OPTIONS` names the options of each command, so that one that nobody has thought of fails. Each is tried on kinds of
models, and for `weft compile` on targets; ``WEFT_TESTS=all`` tries all combinations.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from weft.frontends.app.cli import cli
from weft.frontends.app.cli.option_rules import APPLIES, EXCLUDES, NEEDS

from ....sampling import ALL, by_turns, each
from ...command import done, refused, weft_command

ATTENTION = "Attention(heads=4, kv_heads=2, rope=RoPE())"
POST = 'Block(Attention(heads=4), MLP(64, bias=True), LayerNorm(), "post"'
ENCODER = f"Encoder(12, 64, 2, {POST}), LearnedPositions(16)"
ARCHITECTURES = {
    "decoder": f"Decoder(12, 64, 2, Block({ATTENTION}, GatedMLP(64), RMSNorm()), context=16, tie_embeddings=False)",
    "encoder": f"{ENCODER})",
    "head": f'{ENCODER}, head=TaskHead("text-classification", ("bad", "good"), pool="first"))',
    "seq2seq": f"EncoderDecoder({ENCODER}), Decoder(12, 64, 2, {POST}, cross=CrossAttention(4)), "
    "positions=LearnedPositions(16)))",
}
WORDS = ["<s>", "</s>", "user", "assistant", "hello", "there", "what", "is", "the", "sky", "blue", "."]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"

KINDS = ("decoder", "random", "quantized", "encoder", "head", "seq2seq")  # random: an architecture without a checkpoint
SLOW = [("transformers", "head"), ("transformers", "seq2seq")]  # seconds each
TARGETS = ("ort-cpu", "ort-cuda", "onnx", "torch", "transformers")
FEWER_LAYERS = "prune-layers{layers=[1]}"
SOURCE = {  # options of all commands that read a source: what is given, or in a sentence why nothing shows
    "--adapter": ["nowhere"],
    "--without": ["nothing"],
    "--seed": ["3"],
}
OPENING: dict[str, list[str] | str] = {  # likewise, of the commands that open a model to run it
    "--trust": [],
    "--check": "A check that passes is silent.",
    "--adapter": ["nowhere"],
    "--without": ["nothing"],
    "--target": ["torch"],
}
OPTIONS: dict[str, dict[str, list[str] | str]] = {
    "compile": {
        **SOURCE,
        "--out": "Every case gives it.",
        "--target": "Each case has one.",
        "--dtype": ["bf16"],
        "--passes": [f"{FEWER_LAYERS}, default"],
        "--weights": ["int8{method=rtn, group=32}"],
        "--max-length": ["8"],
        "--dump-ir": ["steps"],
        "--verify": "A check that passes is silent.",
        "--as": ["mistral"],
        "--switch-adapter": ["nowhere"],
        "--trace": [],
        "--cache-dtype": ["int8"],
        "--cache": ["buffer"],
        "--opset": ["17"],
        "--for": ["tract"],
        "--layout": ["optimum"],
        "--precisions": ["fp16"],
        "--javascript": ["nowhere"],
        "--page": ["live"],
        "--keep-blocks": ["all"],
        "--prepack": [],
        "--arithmetic": ["f32"],
        "--activations": ["fp8"],
        "--class-name": ["Named"],
        "--explain": [],
        "--json": [],
    },
    "export": {
        **SOURCE,
        "--out": "Every case gives it.",
        "--format": ["gguf"],
        "--passes": [FEWER_LAYERS],
        "--dtype": ["f16"],
        "--weights": ["codes"],
        "--trace": [],
        "--json": [],
    },
    "opt": {
        **{name: given for name, given in SOURCE.items() if name != "--seed"},
        "--out": "Every case gives it.",
        "--passes": [FEWER_LAYERS],
        "--dtype": ["f16"],
        "--dump-ir": ["steps"],
        "--viz": ["steps.html"],
        "--verify": [],
        "--trace": [],
        "--json": [],
        "--list": "It lists the passes and ends.",
    },
    "run": {
        "--prompt": ["what is the"],
        "--ids": ["1,2,9"],
        "--sound": ["../../sound.npy"],
        "--chat": [],
        "--system": ["sky"],
        "--max-tokens": ["2"],
        "--temperature": ["9"],
        "--top-k": ["5"],
        "--top-p": ["0.99"],
        "--min-p": ["0.01"],
        "--repetition-penalty": ["9"],
        "--beams": ["3"],
        "--seed": ["1"],
        "--prompt-lookup": ["3"],
        "--assistant": ["../../decoder-run"],
        "--prefix-cache": ["9"],
        "--stop": ["e"],
        "--pooling": ["max"],
        "--pair": ["blue", "--pair", "sky"],
        "--normalize": [],
        "--prompt-name": ["query"],
        "--truncate-dim": ["3"],
        "--device": "Each device computes the same.",
        "--expose": "It writes a file in place of an answer.",
        **dict.fromkeys(("--layers", "--out"), "They need --expose."),
        "--experts-on-device": ["2"],
        "--threads": "Threads change the time alone.",
        **OPENING,
    },
    "eval": {
        "--against": "Every case gives it.",
        "--text": "Every case gives it.",
        "--passes": ["half=cast{dtype=f16}"],
        "--weights": ["int8{method=rtn, group=32}"],
        "--adapter": ["nowhere"],
        "--tokens": ["3"],
        "--context": ["4"],
        "--layers": [],
        "--plot": ["chart.svg"],
        "--theme": ["dark"],
        **dict.fromkeys(("--max-kl", "--max-loss", "--min-cosine"), "A limit changes the exit status alone."),
        "--device": "Each device computes the same.",
        "--trust": [],
        "--json": "Every case gives it.",
        "--record": "It writes into the folders of the models.",
    },
    "serve": {
        **dict.fromkeys(("--host", "--port", "--model-name", "--api-key"), "Servers of all kinds of models have it."),
        **dict.fromkeys(("--max-batch", "--max-queue", "--max-body"), "Servers of all kinds of models have it."),
        **dict.fromkeys(("--client-timeout", "--drain"), "Servers of all kinds of models have it."),
        **dict.fromkeys(("--prefix-cache", "--prompt-lookup"), "Servers of other models refuse what changes the time."),
        "--device": "Each device computes the same.",
        "--threads": "Threads change the time alone.",
        **OPENING,
    },
}
ECHOES = ("checksum", "files", "passes", "pipeline", "source", "kept_blocks", "prepacked", "cache_dtype")


def tried(command: str) -> list[str]:
    """The options of `command` that may show."""
    return [option for option, given in OPTIONS[command].items() if not isinstance(given, str)]


def flags(command: str) -> dict[str, str]:
    """Return what messages call the options of `command`, by name."""
    params = cli.commands[command].get_params(click.Context(cli.commands[command], info_name=command))
    return {str(p.name): max(p.opts, key=len) for p in params if isinstance(p, click.Option) and not p.hidden}


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_is_classified(command: str) -> None:
    assert {*flags(command).values()} - {"--help"} == {*OPTIONS[command]}


def test_tables_contain_existing_options_only() -> None:
    assert {name for names, *_ in APPLIES for name in names.split()} <= flags("run").keys() | flags("serve").keys()
    for table in (NEEDS, EXCLUDES):
        for command, rows in table.items():
            known = flags(command).keys() | {"models"}
            assert {*rows, *" ".join(rows.values()).split()} <= known


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source of each kind, and one with weights in codes."""
    home = tmp_path_factory.mktemp("models")
    for name, text in ARCHITECTURES.items():
        (home / f"{name}.py").write_text(f"from weft import *\nmodel = {text}\n")
        if name != "decoder":
            done("opt", home / f"{name}.py", "-o", home / name)
    (home / "decoder.py").rename(home / "random.py")
    done("export", home / "random.py", "-o", home / "decoder")
    done("opt", home / "random.py", "--passes", "quantize{bits=4, method=rtn}", "-o", home / "coded")
    add_tokenizer(home / "decoder")
    done("export", home / "random.py", "--dtype", "q8_0", "-o", home / "quantized.gguf")
    for kind in ("encoder", "head"):
        add_tokenizer(home / kind)
    (home / "text.txt").write_text("the sky is blue . what is the sky\nhello there\n")
    np.save(home / "sound.npy", np.zeros((8, 100), np.float32))
    return home


def add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def source(home: Path, kind: str) -> Path:
    return home / {"random": "random.py", "quantized": "quantized.gguf"}.get(kind, kind)


@cache
def to_run(home: Path, kind: str) -> Path:
    """A compiled folder of a kind."""
    out = home / f"{kind}-run"
    whole = "default,-last-token-logits" if kind in ("decoder", "seq2seq") else "default"
    done("compile", source(home, kind), "--passes", whole, "-o", out)
    add_tokenizer(out)
    return out


def seen(folder: Path, *args: str | Path) -> tuple[int, dict[str, Any], str]:
    """Run a command in a new `folder`: its exit status, what it wrote and printed, but for times, and its last line."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = weft_command(*args)
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.name in ("weft.json", "provenance.json"):
            record = json.loads(path.read_text())
            found |= {f"{path.name}: {name}": value for name, value in record.items() if name not in ECHOES}
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    printed = [line for line in result.stderr.splitlines() if not line.startswith("weft: ") or "prompt tok" in line]
    found["printed"] = re.sub(r'[\d.]+(/s| s|e-\d+)|"seconds": [\d.e-]+', "", "\n".join([result.stdout, *printed]))
    assert result.exit_code in (0, 2), result.exception
    return result.exit_code, found, result.stderr.strip().splitlines()[-1] if result.stderr.strip() else ""


class Tried:
    """Runs commands with and without an option; those without are run once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plain = folder, dict[tuple[Any, ...], dict[str, Any]]()

    def __call__(self, command: str, option: str, *args: str | Path, instead: tuple[str | Path, ...] = ()) -> str:
        """Give `option` to a command, with `args`, or with those but the ones it stands `instead` of. Returns the
        refusal, which names the option, or "" if the option changed something."""
        given = OPTIONS[command][option]
        assert not isinstance(given, str)
        rest = [arg for arg in args if arg not in instead]
        status, found, line = seen(self._new(), command, *rest, option, *given)
        if status:
            words = option[2:].replace("-on-device", "").replace("-", "_")
            named = {option, words, *re.findall(r"[\w-]{3,}", " ".join(given))}
            assert any(name.lower() in line.lower() for name in named), line
            return line
        if args not in self.plain:
            status, self.plain[args], line = seen(self._new(), command, *args)
            assert status == 0, line
        assert found != self.plain[args], f"{command} {option} changes nothing"
        return ""

    def _new(self) -> Path:
        return self.folder / str(len(list(self.folder.iterdir())))


@pytest.fixture(scope="module")
def attempt(home: Path) -> Tried:
    (home / "tried").mkdir()
    return Tried(home / "tried")


PLACES = [(target, kind) for target in TARGETS for kind in KINDS if ALL or (target, kind) not in SLOW]


@pytest.mark.halved
@pytest.mark.parametrize(("option", "place"), each(41, product(tried("compile"), PLACES)))
def test_compile(attempt: Tried, home: Path, option: str, place: tuple[str, str]) -> None:
    target, kind = place
    attempt("compile", option, source(home, kind), "-o", "out", "--target", target)


WORKS = {  # places where options have an effect
    "--seed": ("onnx", "random"),
    "--cache-dtype": ("torch", "random"),
    "--cache": ("onnx", "decoder"),
    "--opset": ("onnx", "encoder"),
    "--for": ("onnx", "encoder"),
    "--layout": ("onnx", "decoder"),
    "--precisions": ("web", "decoder"),
    "--keep-blocks": ("torch", "quantized"),
    "--prepack": ("ort-cpu", "encoder"),
    "--class-name": ("transformers", "decoder"),
    "--max-length": ("torch", "decoder"),
}


@pytest.mark.parametrize("option", WORKS)
def test_options_that_apply_are_not_refused(attempt: Tried, home: Path, option: str) -> None:
    target, kind = WORKS[option]
    assert attempt("compile", option, source(home, kind), "-o", "out", "--target", target) == ""


@pytest.mark.parametrize(("option", "kind"), by_turns(tried("export"), KINDS))
def test_export(attempt: Tried, home: Path, option: str, kind: str) -> None:
    """Check each option of export: to a Hugging Face folder if a family has the architecture, else to safetensors."""
    out = "out" if kind in ("decoder", "random", "quantized") else "out.safetensors"
    attempt("export", option, source(home, kind), "-o", out)


@pytest.mark.parametrize(("option", "kind"), by_turns(tried("opt"), KINDS))
def test_opt(attempt: Tried, home: Path, option: str, kind: str) -> None:
    attempt("opt", option, source(home, kind), "-o", "out")


@pytest.mark.parametrize(("option", "kind"), each(3, product(tried("run"), ("encoder", "head", "decoder", "seq2seq"))))
def test_run(attempt: Tried, home: Path, option: str, kind: str) -> None:
    prompt = ("--prompt", "sky is blue sky is")
    to_run(home, "decoder")  # the assistant
    other = option in ("--prompt", "--ids", "--sound")
    attempt("run", option, to_run(home, kind), *prompt, instead=prompt if other else ())


@pytest.mark.parametrize(("option", "kind"), each(9, product(tried("eval"), ("decoder", "encoder"))))
def test_eval(attempt: Tried, home: Path, option: str, kind: str) -> None:
    attempt("eval", option, "--against", home / kind, "--text", home / "text.txt", "--json")


REFUSED = [  # a command line, with {kind} for the source of a kind, and words of the refusal
    (
        "compile {decoder} -o out --seed 0",
        "seed is 0, but it has no effect: the weights of Hugging Face folder",
    ),
    ("compile {quantized} -o out --seed 3", "seed is 3, but it has no effect"),
    ("export {encoder} -o out.safetensors --seed 3", "seed is 3, but it has no effect"),
    ("compile {random} -o out --without x", "has no part 'x' to leave out"),
    ("compile {encoder} -o out --as llama", "so --as has no effect: leave it out"),
    ("compile {random} -o out --class-name=", "'--class-name': '' is the default"),
    ("compile {encoder} -o out --cache-dtype int8", "--cache-dtype int8 has no effect here, so leave it out"),
    ("compile {decoder} -o out --arithmetic f32", "--arithmetic f32 has no effect here, so leave it out"),
    ("compile {coded} -o out --weights int8", "--weights int8 has no effect here, so leave it out: quantize{bits=8}"),
    ("compile {coded} -o out --keep-blocks all", "no linear map has blocks of a checkpoint"),
    ("compile {quantized} -o out --target torch --activations fp8", "no weights are FP8 blocks"),
    ("export {decoder} -o out --weights float", "--weights float has no effect here, so leave it out"),
    ("export {coded} -o out.safetensors --weights float", "--weights float needs format hf or gguf"),
    ("export {decoder} -o out --trace", "--trace needs --passes"),
    ("opt {random} --verify", "--verify needs --passes"),
    ("opt {random} -p dce --without x", "--without needs a folder to write"),
    ("inspect {random} --dtype f32", "--dtype needs --parts, --weights, --parallel or --json"),
    ("run {encoder} --prompt sky --top-k 3", "--top-k chooses the tokens of an answer, and "),
    ("run {random} --ids 1 --without x", "has no part 'x' to leave out"),
    ("run {random} --ids 1 --pair sky", "--pair is a second text for a head, and "),
    ("run {random} --ids 1 --system sky", "--system needs --chat"),
    ("run {random} --ids 1 --prefix-cache 9", "--prefix-cache needs a conversation"),
    ("run {random} --ids 1 --prompt sky", "--ids cannot be combined with --prompt"),
    ("run {head} --prompt sky --pair is --pooling max", "--pair cannot be combined with --pooling"),
]


@pytest.mark.parametrize(("line", "words"), REFUSED)
def test_refusals_give_the_reason(
    home: Path, tmp_path: Path, line: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = [re.sub(r"\{(\w+)\}", lambda kind: str(source(home, kind[1])), arg) for arg in line.split()]
    assert words in refused(*args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", tried("serve"))
def test_serve(attempt: Tried, home: Path, option: str) -> None:
    assert attempt("serve", option, to_run(home, "decoder"), "--port", "0")
