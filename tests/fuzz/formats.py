"""Mutated formats and the commands that read them: one function for each format, all seeded."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import binary, mutations
from .onnx_models import mutated_onnx
from .seeds import ARCHITECTURES, EXPORTED
from .words import COMMANDS, NASTY, PIPELINES, SOURCES, STATEMENTS, TEMPLATES, WORDS


@dataclass
class Case:
    """A command over files that were written into a scratch folder.

    `overlaps`: a tensor shares bytes with another one, or lies where it must not. `sound`: says so where only another
    reader can tell.
    """

    args: list[str]
    overlaps: bool = False
    safetensors: Path | None = None
    input: str | None = None
    env: dict[str, str | None] = field(default_factory=dict)
    path: Path | None = None  # a folder of modules
    request: tuple[str, dict[str, str], bytes] | None = None  # path, headers and body, to a server of the small llama


Generator = Callable[[random.Random, Path, Path], Case]  # of corpus and scratch folder


def _copied(source: Path, scratch: Path) -> Path:
    folder = scratch / "in"
    shutil.copytree(source, folder)
    return folder


def _command(rng: random.Random, source: Path, scratch: Path, tokenizer: bool = True) -> list[str]:
    """A command that reads the model `source`, mostly one that is quick."""
    out, at = str(scratch / "out"), str(source)
    quick = (["inspect", at], ["inspect", at, "--json"], ["opt", at], ["opt", at, "-o", out], ["export", at, "-o", out])
    slow = (
        ["compile", at, "-o", out],
        ["opt", at, "-p", "default"],
        ["viz", at, "-o", f"{out}.svg"],
        ["viz", at, "-o", f"{out}.html"],
        ["export", at, "--format", "gguf", "-o", f"{out}.gguf"],
        ["run", at, "--ids", "1,2,3", "--max-tokens", "2"],
        ["run", at, *(["--prompt", "the sky"] if tokenizer else ["--ids", "5"]), "--max-tokens", "2"],
    )
    return rng.choice(quick if rng.random() < 0.75 else slow)


def config(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """config.json and the other JSON files of a Hugging Face folder."""
    folder = _copied(corpus / "hf" / rng.choice((*EXPORTED, "sharded")), scratch)
    files = sorted(folder.glob("*.json"))
    file = folder / "config.json" if rng.random() < 0.6 else rng.choice(files)
    text = file.read_text(encoding="utf-8")
    if file.name == "config.json" and rng.random() < 0.1:
        how = {"quant_method": rng.choice(("fp8", "mxfp4", "gptq", 3)), "weight_block_size": mutations.value(rng)}
        text = json.dumps({**json.loads(text), "quantization_config": how})
    file.write_bytes(mutations.json_text(rng, text))
    return Case(_command(rng, folder, scratch))


def families(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """The config of any family beside weights that are another's."""
    configs = sorted((corpus / "configs").glob("*.json"))
    if not configs:  # they are made of transformers, for long runs
        return config(rng, corpus, scratch)
    folder = _copied(corpus / "hf" / "llama", scratch)
    text = rng.choice(configs).read_text(encoding="utf-8")
    (folder / "config.json").write_bytes(mutations.json_text(rng, text))
    return Case(["inspect", str(folder)])


def safetensors(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """The weights of a Hugging Face or model folder."""
    source = rng.choice((*(corpus / "hf" / name for name in (*EXPORTED, "sharded")), corpus / "opt" / "llama"))
    folder = _copied(source, scratch)
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    file.write_bytes(binary.safetensors(rng, file.read_bytes()))
    return Case(_command(rng, folder, scratch), safetensors=file)


def gguf(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """A GGUF file."""
    file = scratch / "in.gguf"
    changed, overlaps = binary.gguf(rng, (corpus / "gguf" / f"{rng.choice(EXPORTED)}.gguf").read_bytes())
    file.write_bytes(changed)
    return Case(_command(rng, file, scratch), overlaps)


def text(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """IR text."""
    file = scratch / "in.weft"
    found = mutations.source_text(rng, (corpus / "text" / f"{rng.choice(list(ARCHITECTURES))}.weft").read_text("utf-8"))
    data = found.encode("utf-8", "replace")
    file.write_bytes(mutations.raw_bytes(rng, data) if rng.random() < 0.05 else data)
    return Case(_command(rng, file, scratch, tokenizer=False))


def model_folder(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """A model folder of `weft opt`: its text, provenance.json and tokenizer."""
    folder = _copied(corpus / "opt" / "llama", scratch)
    file = rng.choice(sorted(f for f in folder.iterdir() if f.suffix in (".json", ".weft")))
    old = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        file.write_bytes(mutations.json_text(rng, old))
    else:
        file.write_bytes(mutations.source_text(rng, old).encode("utf-8", "replace"))
    return Case(_command(rng, folder, scratch))


def _of_compiled(rng: random.Random, folder: Path, corpus: Path, scratch: Path) -> list[str]:
    at = str(folder)
    text = scratch / "text.txt"
    text.write_text("the sky is blue and the sea is deep")
    return rng.choice(
        (
            ["run", at, "--ids", "1,2,3", "--max-tokens", "3"],
            ["run", at, "--prompt", "the sea", "--max-tokens", "3"],
            ["run", at, "--prompt", "the sea", "--chat", "--max-tokens", "2"],
            ["verify", at, "--tokens", "1", "--trust"],
            ["verify", at, "--tokens", "0", "--json"],
            ["viz", at, "-o", str(scratch / "out.svg"), "--trust"],
            ["inspect", at],
            ["eval", at, "--against", str(corpus / "onnx" / "gpt2"), "--text", str(text), "--tokens", "8"],
        )
    )


def manifest(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """weft.json of a compiled folder."""
    torch = rng.random() < 0.1
    folder = _copied(corpus / ("torch/llama" if torch else f"onnx/{rng.choice(list(ARCHITECTURES))}"), scratch)
    file = folder / "weft.json"
    said = json.loads(file.read_text(encoding="utf-8"))
    if rng.random() < 0.7:  # nothing to check the rest against
        said = {key: value for key, value in said.items() if key not in ("files", "checksum")}
    file.write_bytes(mutations.json_text(rng, json.dumps(said, indent=1)))
    args = _of_compiled(rng, folder, corpus, scratch)
    return Case([*args, *(["--trust"] if torch and args[0] == "run" else [])])


def genai(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """genai_config.json of a folder that says nothing else of itself."""
    folder = _copied(corpus / "onnx" / rng.choice(("llama", "gpt2", "moe")), scratch)
    (folder / "weft.json").unlink()
    file = folder / "genai_config.json"
    file.write_bytes(mutations.json_text(rng, file.read_text(encoding="utf-8")))
    return Case(_of_compiled(rng, folder, corpus, scratch))


def tokenizer(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """The tokenizer's files of a compiled folder, or of one that is exported or compiled; chat templates."""
    compiled = rng.random() < 0.7
    folder = _copied(corpus / ("onnx" if compiled else "hf") / "llama", scratch)
    what, at = rng.random(), str(folder)
    if what < 0.35:
        data = mutations.source_text(rng, rng.choice(TEMPLATES), TEMPLATES).encode("utf-8", "replace")
        (folder / "chat_template.jinja").write_bytes(data + b"\xff\xfe" * (rng.random() < 0.2))
    else:
        file = folder / rng.choice(
            ("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
        )
        file.write_bytes(mutations.json_text(rng, file.read_text(encoding="utf-8")))
    if compiled:
        chat = ["--chat"] if what < 0.5 else []
        return Case(["run", at, "--prompt", rng.choice(("the sky", "", "é💥", "a\x00b")), *chat, "--max-tokens", "2"])
    out = str(scratch / "out")
    return Case(rng.choice((["export", at, "--format", "gguf", "-o", f"{out}.gguf"], ["opt", at, "-o", out])))


def onnx(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """An ONNX model, as other exporters might write one; a folder with such a model."""
    if rng.random() < 0.9:
        file = scratch / "in.onnx"
        file.write_bytes(
            mutated_onnx(rng, (corpus / "onnx" / rng.choice(list(ARCHITECTURES)) / "model.onnx").read_bytes())
        )
        return Case(["viz", str(file), "-o", str(scratch / rng.choice(("out.svg", "out.html", "out.dot")))])
    folder = _copied(corpus / "onnx" / "llama", scratch)
    file = folder / "model.onnx"
    file.write_bytes(mutations.raw_bytes(rng, file.read_bytes()))
    return Case(["run", str(folder), "--ids", "1,2", "--max-tokens", "2"])


def architecture(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """An architecture file."""
    file = scratch / "in.py"
    lines = ARCHITECTURES[rng.choice(list(ARCHITECTURES))].strip().split("\n")
    if rng.random() < 0.5:
        lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(STATEMENTS))
        changed = "\n".join(lines)
    else:
        head, *rest = lines
        numbers = tuple(str(n) for n in mutations.NUMBERS if n == n and abs(n) < 1e300)
        words = (
            "Attention",
            "MLP(8)",
            "None",
            "RoPE()",
            "RMSNorm",
            '"x"',
            "heads",
            "[]",
            "Mamba(8)",
            "Repeat(block, 2)",
        )
        changed = head + "\n" + mutations.source_text(rng, "\n".join(rest), (*words, *numbers))
    data = changed.encode("utf-8", "replace")
    file.write_bytes(mutations.raw_bytes(rng, data) if rng.random() < 0.03 else data)
    name = rng.choice(("", "", "", ":model", ":block", ":nothing", ":Decoder"))
    small = max((int(n) for n in re.findall(r"\d+", changed) if len(n) < 4000), default=0) < 5000  # to be written
    write = (["opt", "-o", str(scratch / "out")], ["export", "-o", str(scratch / "out")]) if small else ()
    command = rng.choice((["inspect"], ["opt"], *write))
    return Case([command[0], f"{file}{name}", *command[1:]])


def _pass(rng: random.Random) -> str:
    """A pass, its arguments of any value; mostly of one that fits."""
    from weft.passes.core.base import all_passes

    kind = rng.choice(list(all_passes().values()))
    given = []
    for argument in kind.arguments():
        if argument.required or rng.random() < 0.4:
            choices = argument.type_text.split(" | ") if "'" not in str(argument.type) else []
            fitting = ("1", "2", "0.5", "4", "[0]", "[1, 0]", "0", "f16", "none", "true", *choices)
            given.append(f"{argument.name}={rng.choice(fitting if rng.random() < 0.8 else WORDS)}")
    return kind.name + (f"{{{', '.join(given)}}}" if given else "")


def pipeline(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """The text of a pipeline, in an argument or a file."""
    source = str(corpus / "text" / f"{rng.choice(list(ARCHITECTURES))}.weft")
    given = ", ".join(_pass(rng) for _ in range(rng.choice((1, 1, 2, 4))))
    if rng.random() < 0.5:
        given = mutations.source_text(rng, rng.choice((given, *PIPELINES)), WORDS)
    if rng.random() < 0.2:
        file = scratch / "p.pipeline"
        data = given.encode("utf-8", "replace")
        file.write_bytes(mutations.raw_bytes(rng, data) if rng.random() < 0.3 else data)
        given = rng.choice((f"@{file}", str(file), f"@{scratch / 'none'}", "@", "@~nobody/x", "@/dev/null"))
    return Case(["opt", source, *rng.choice((["-p", given], [f"-p{given}"], [f"--passes={given}"]))])


def calibration(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """The texts that passes and `weft eval` read."""
    file = scratch / rng.choice(("t.json", "t.npy", "t.txt"))
    if file.suffix == ".json":
        file.write_bytes(mutations.json_text(rng, "[[1, 2, 3, 4], [5, 6, 7]]"))
    elif file.suffix == ".npy":
        head = b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (2, 2), }" + b" " * 55 + b"\n"
        file.write_bytes(mutations.raw_bytes(rng, head + bytes(32)))
    else:
        file.write_bytes(mutations.raw_bytes(rng, "the sky is blue é💥 ".encode() * 30))
    if rng.random() < 0.5:
        pair = (str(corpus / "onnx" / "llama"), "--against", str(corpus / "onnx" / "llama"))
        return Case(["eval", *pair, "--text", str(file), "--tokens", "16"])
    return Case(
        ["opt", str(corpus / "hf" / "llama"), "-p", f'mha-to-gqa{{kv_heads=1, method=svd, calibration="{file}"}}']
    )


def arguments(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """Arguments of the command line."""
    command = rng.choice(list(COMMANDS))
    args = [command]
    sources = (*SOURCES, *NASTY, str(corpus / "llama.py"), str(corpus / "onnx" / "llama"), str(corpus / "hf"))
    if rng.random() < 0.8 and command not in ("gallery", "families", "ops", "passes", "presets", "completion"):
        args.append(rng.choice(sources))
    for _ in range(rng.randrange(4)):
        option = rng.choice(COMMANDS[command] or ("--x",))
        args.append(option)
        if rng.random() < 0.8:
            args.append(rng.choice((*NASTY, *map(str, mutations.NUMBERS), "f16", "torch", "hf", "x.svg")))
    if command == "gallery" or "--list" in args:  # seconds, whatever the arguments
        args = [command, "--nothing"]
    if rng.random() < 0.1:
        args.insert(rng.randrange(len(args)), rng.choice((*NASTY, "--help", "--version")))
    return Case(
        [str(scratch / a) if a in ("x.svg",) else a for a in args],
        input=rng.choice(("", "the sky", None)),
        env={"HOME": None} if rng.random() < 0.1 else {},
    )


def adapter(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """A LoRA adapter beside its base model, or in the same folder."""
    folder = _copied(corpus / "adapter", scratch)
    file = folder / rng.choice(("adapter_config.json", "adapter_config.json", "adapter_model.safetensors"))
    weights = file.suffix == ".safetensors"
    if weights:
        file.write_bytes(binary.safetensors(rng, file.read_bytes()))
    else:
        file.write_bytes(mutations.json_text(rng, file.read_text(encoding="utf-8")))
    base, out = corpus / "hf" / "llama", str(scratch / "out")
    if rng.random() < 0.3:
        shutil.copytree(base, folder, dirs_exist_ok=True)
        args = ["inspect", str(folder)]
    else:
        args = [*rng.choice((["inspect", str(base)], ["opt", str(base), "-o", out])), "--adapter", str(folder)]
    return Case(args, safetensors=file if weights else None)


FORMATS: dict[str, tuple[Generator, int]] = {  # with how many of a hundred inputs are of it
    "config": (config, 13),
    "families": (families, 10),
    "safetensors": (safetensors, 13),
    "gguf": (gguf, 13),
    "ir text": (text, 12),
    "model folder": (model_folder, 5),
    "manifest": (manifest, 6),
    "genai_config": (genai, 3),
    "tokenizer": (tokenizer, 5),
    "onnx": (onnx, 6),
    "architecture": (architecture, 5),
    "pipeline": (pipeline, 4),
    "texts": (calibration, 2),
    "arguments": (arguments, 3),
    "adapter": (adapter, 3),
}
