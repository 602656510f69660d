"""Further kinds of input: quantized folders, code for transformers, tokenizers, plugins, sizes, names, requests."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from . import binary, mutations
from .formats import Case, Generator, _command, _copied
from .onnx_models import named_onnx
from .seeds import ARCHITECTURES, EXPORTED, TOKENIZERS
from .words import COMMANDS, NASTY, PLUGINS, STATEMENTS, TEMPLATES

HUGE: tuple[Any, ...] = (
    *(2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 2**64 + 1, 10**20, 10**100, 10**308, 10**309, 10**400),
    *(-(2**31) - 1, -(2**63), -(2**63) - 1, -(10**400), 10**4299, -1, 0, 1e308, 1e19, -1e19, 2.0**63, 1.5),
)


def quantized(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """A quantized Hugging Face folder: its quantization_config, and its packed tensors."""
    folder = _copied(rng.choice(sorted((corpus / "quantized").iterdir())), scratch)
    config, weights = folder / "config.json", folder / "model.safetensors"
    if rng.random() < 0.6:
        tree = json.loads(config.read_text(encoding="utf-8"))
        tree["quantization_config"] = mutations.json_tree(rng, tree["quantization_config"])
        config.write_text(json.dumps(tree), encoding="utf-8")
    else:
        weights.write_bytes(binary.safetensors(rng, weights.read_bytes()))
    return Case(_command(rng, folder, scratch, tokenizer=False), safetensors=weights)


def for_transformers(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """A folder of target transformers: its config, manifest and weights."""
    folder = _copied(corpus / "transformers" / "llama", scratch)
    file = rng.choice(sorted(f for f in folder.iterdir() if f.suffix in (".json", ".safetensors")))
    if file.suffix == ".json":
        file.write_bytes(mutations.json_text(rng, file.read_text(encoding="utf-8")))
    else:
        file.write_bytes(binary.safetensors(rng, file.read_bytes()))
    at = str(folder)
    trust = ["--trust"] if rng.random() < 0.5 else []
    command = rng.choice((["verify", at, "--tokens", "0"], ["run", at, "--ids", "1,2", "--max-tokens", "1"]))
    return Case(rng.choice(([*command, *trust], _command(rng, folder, scratch))))


def auto_map(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """Keys of configs that name code or families, with --as."""
    folder = _copied(corpus / "hf" / rng.choice(EXPORTED), scratch)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    for key in rng.sample(("auto_map", "architectures", "model_type", "transformers_version", "torch_dtype"), 2):
        config[key] = rng.choice((mutations.value(rng), {"AutoModel": mutations.value(rng)}, [mutations.value(rng)]))
    file.write_text(json.dumps(config), encoding="utf-8")
    family = rng.choice(("llama", "gpt2", "mixtral", "bert", "nothing", *NASTY))
    return Case([rng.choice(("inspect", "opt")), str(folder), "--as", family])


def tokenizers(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """Tokenizers of all kinds, in a compiled folder or one that is compiled; and those of GGUF files."""
    kind = rng.choice(TOKENIZERS)
    text = (corpus / "tokenizers" / f"{kind}.json").read_text(encoding="utf-8")
    changed = mutations.json_text(rng, text)
    if rng.random() < 0.3:  # parts of other tokenizers
        tree, other = (
            json.loads(text),
            json.loads((corpus / "tokenizers" / f"{rng.choice(TOKENIZERS)}.json").read_text()),
        )
        for key in rng.sample(sorted(tree), 2):
            tree[key] = mutations.near(rng, other[key]) if rng.random() < 0.5 else other[key]
        changed = json.dumps(tree).encode()
    if rng.random() < 0.2:
        file = scratch / "in.gguf"
        parts = binary.parse_gguf((corpus / "gguf" / "llama.gguf").read_bytes())
        for k in [k for k, key in enumerate(parts.keys) if key[0].startswith(b"tokenizer")]:
            if rng.random() < 0.3:
                parts.keys[k] = (parts.keys[k][0], *binary.gguf_value(rng, *parts.keys[k][1:]))
        file.write_bytes(binary.write_gguf(parts))
        return Case(_command(rng, file, scratch))
    compiled = rng.random() < 0.6
    folder = _copied(corpus / ("onnx" if compiled else "hf") / "llama", scratch)
    (folder / "tokenizer.json").write_bytes(changed)
    if rng.random() < 0.3:
        (folder / "chat_template.jinja").write_text(rng.choice(TEMPLATES), encoding="utf-8")
    out = str(scratch / "out")
    if compiled:
        words = rng.choice(("the sky", "", "é💥\u200d", "a\x00b", " " * 500, "x" * 20_000, "<|end|>", "\ufffd\uffff"))
        more = rng.choice((["--chat"], ["--stop", "x"], []))
        return Case(["run", str(folder), "--prompt", words, "--max-tokens", "2", *more])
    commands = (["export", str(folder), "--format", "gguf", "-o", f"{out}.gguf"], ["compile", str(folder), "-o", out])
    return Case(rng.choice((*commands, ["opt", str(folder), "-o", out])))


def plugin(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """A module of --import, and one that an architecture file imports."""
    name = f"plugin_{rng.randrange(10**12)}"
    lines = [rng.choice((*PLUGINS, *STATEMENTS)) for _ in range(rng.choice((1, 1, 2)))]
    text = "from weft import *\n" + "\n".join(lines) + "\n"
    data = text.encode("utf-8", "replace")
    (scratch / f"{name}.py").write_bytes(mutations.raw_bytes(rng, data) if rng.random() < 0.1 else data)
    given = rng.choice((name, name, name, f"{name}:x", f"{name}.x", f" {name}", *NASTY))
    commands = (["ops"], ["passes"], ["targets"], ["inspect", str(corpus / "llama.py")], ["opt", "gpt2", "-p", "dce"])
    return Case(["--import", given, *rng.choice(commands)], path=scratch)


def sizes(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """Numbers that no machine has, in configs, in IR text, in architectures, in GGUF keys and in options."""
    what, number = rng.randrange(6), rng.choice(HUGE)
    if what == 0:
        folder = _copied(corpus / "hf" / rng.choice(EXPORTED), scratch)
        file = folder / rng.choice(("config.json", "config.json", "tokenizer_config.json", "tokenizer.json"))
        text = file.read_text(encoding="utf-8")
        source = folder
    elif what in (1, 2):
        suffix = ".weft" if what == 1 else ".py"
        name = f"{rng.choice(list(ARCHITECTURES))}{suffix}"
        text = (corpus / ("text" if what == 1 else ".") / name).read_text(encoding="utf-8")
        source = file = scratch / f"in{suffix}"
    elif what == 3:
        parts = binary.parse_gguf((corpus / "gguf" / f"{rng.choice(EXPORTED)}.gguf").read_bytes())
        k = rng.choice([k for k, key in enumerate(parts.keys) if key[1] not in (8, 9)])
        wide = max(-(2**63), min(int(number), 2**64 - 1))
        parts.keys[k] = (parts.keys[k][0], *((10, wide) if wide >= 0 else (11, wide)))
        file = scratch / "in.gguf"
        file.write_bytes(binary.write_gguf(parts))
        return Case(_command(rng, file, scratch))
    elif what == 4:
        command = rng.choice([name for name, options in COMMANDS.items() if options and name != "gallery"])
        option = rng.choice(COMMANDS[command])
        return Case([command, str(corpus / "hf" / "llama"), option, str(number), "-o", str(scratch / "out")])
    else:
        folder = _copied(corpus / "onnx" / "llama", scratch)
        file = folder / rng.choice(("weft.json", "genai_config.json", "tokenizer.json"))
        text = file.read_text(encoding="utf-8")
        if file.name == "weft.json":
            said = json.loads(text)
            text = json.dumps({key: value for key, value in said.items() if key not in ("files", "checksum")})
        elif file.name == "genai_config.json":
            (folder / "weft.json").unlink()
        source = folder
    found = list(re.finditer(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", text))
    for match in sorted(rng.sample(found, min(len(found), rng.choice((1, 1, 2)))), key=lambda m: -m.start()):
        text = text[: match.start()] + str(number) + text[match.end() :]
    file.write_text(text, encoding="utf-8")
    if what == 5:
        run = ["run", str(source), *rng.choice((["--ids", "1,2"], ["--prompt", "the sea"])), "--max-tokens", "2"]
        return Case(rng.choice((run, ["inspect", str(source)], ["verify", str(source), "--tokens", "1"])))
    if what == 2:  # writing what it describes may take the disk
        return Case(rng.choice((["inspect", str(source)], ["opt", str(source)], ["inspect", str(source), "--json"])))
    return Case(_command(rng, source, scratch, tokenizer=what == 0))


def onnx_names(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """An ONNX model whose names are nothing that one would choose."""
    file = scratch / "in.onnx"
    file.write_bytes(named_onnx(rng, (corpus / "onnx" / rng.choice(list(ARCHITECTURES)) / "model.onnx").read_bytes()))
    return Case(["viz", str(file), "-o", str(scratch / rng.choice(("out.svg", "out.html", "out.dot", "out.mmd")))])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1]}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"prompt": "the sky", "n": 2, "stop": ["x"], "logprobs": 2, "echo": False, "seed": 1},
        {"prompt": [[1, 2], [3]], "temperature": 0.5, "top_p": 0.5, "logit_bias": {"5": 1}, "stream": True},
        {"prompt": ["a", "b"], "structured_outputs": {"regex": "[ab]{2}"}, "echo": True},
        {"prompt": "a", "structured_outputs": {"json": SCHEMA}},
        {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}},
        {"prompt": "a", "structured_outputs": {"grammar": 'start: a+\na: "x" | /[0-9]+/'}},
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {"include_usage": True}},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "logprobs": True,
            "top_logprobs": 1,
        },
        {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "tool_choice": "required"},
        {
            "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
            "chat_template_kwargs": {},
        },
        {
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        },
    ),
    "/v1/embeddings": ({"input": ["a", "b"], "encoding_format": "float"},),
}
GRAMMARS = (
    "start: nothing", "start: (" * 300, 'start: "a" ' * 3000, "", "start: %json {", "start: /[/", "start: <[999999]>",
    "start: " + "|".join(f'"{i}"' for i in range(3000)), "start: x\nx: x x | x", "start: \x00", "%import common.X",
    "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000)) + '\nr3000: "a"\nstart: r0', "(?=a)b", "(a{1,99}){1,99}",
    "[" * 5000, "\\p{Nothing}", "a{99999999999}", "((((a{1,100}){1,100}){1,100}){1,100})", "(", "\\", "é💥{3}",
)  # fmt: skip


def serve(rng: random.Random, corpus: Path, scratch: Path) -> Case:
    """The body of a request to `weft serve`, and its head."""
    path = rng.choice(list(BODIES))
    body = {"model": "llama", "max_tokens": 3, **rng.choice(BODIES[path])}
    if path.endswith("embeddings"):
        del body["max_tokens"]
    if rng.random() < 0.15:
        key = rng.choice(("regex", "grammar", "choice", "json"))
        value: Any = rng.choice(GRAMMARS)
        value = {"choice": [value], "json": {"pattern": value, "type": "string"}}.get(key, value)
        body["structured_outputs"] = {key: value}
        data = json.dumps(body).encode()
    else:
        data = mutations.json_text(rng, json.dumps(body))
    headers = {"content-type": "application/json", "host": "localhost"}
    if rng.random() < 0.1:
        headers[rng.choice(("content-type", "host", "authorization", "x"))] = rng.choice(("", "x", "\xff", "a" * 4000))
    return Case([], request=(path, headers, data))


MORE: dict[str, tuple[Generator, int]] = {
    "quantized": (quantized, 6),
    "transformers": (for_transformers, 4),
    "auto_map": (auto_map, 2),
    "tokenizers": (tokenizers, 8),
    "plugin": (plugin, 3),
    "sizes": (sizes, 10),
    "onnx names": (onnx_names, 3),
    "serve": (serve, 8),
}
