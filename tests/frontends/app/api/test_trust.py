"""Reading a folder runs nothing: every file of it may be hostile, and no command runs it without --trust.

`make test` lets every second command read each hostile folder, the others the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from weft.backends.runtime.text.chat import ChatTemplate
from weft.ir import WeftError
from weft.ir.storage import MANIFEST, PROVENANCE, write_manifest
from weft.ir.storage.contents import SEALED, hash_file

from ....sampling import each
from ...command import TINY, done, weft_command

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("inspect", "{}"),
    ("verify", "{}", "--tokens", "1"),
    ("verify", "{}", "--tokens", "1", "--against", "{}"),
    ("viz", "{}", "-o", "page.html"),
    ("viz", "tiny.py", "--vs", "{}", "-o", "page.html"),
    ("opt", "{}", "-o", "rewritten/"),
    ("export", "{}", "-o", "exported/"),
    ("run", "{}", "--ids", "1,2", "--max-tokens", "1", "--device", "cpu"),
    ("run", "{}", "--chat", "--prompt", "hello", "--max-tokens", "1", "--device", "cpu"),
    ("eval", "{}", "--against", "{}", "--text", "text.txt"),
    ("gallery", "{}", "-o", "gallery.html"),
    ("compile", "{}", "-o", "compiled/"),
)


class Evil:
    """Runs when it is unpickled."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.ran),)


def code(ran: Path) -> str:
    return f"import os\nos.makedirs({str(ran)!r}, exist_ok=True)\n{TINY}\nclass Model: pass\n"


Plant = Callable[[Path, Path], None]  # (folder, what appears when code runs)


def named(spec: str, at: str = "evil.py", **changes: Any) -> Plant:
    """A manifest that names code of the folder as the source, with its right hash."""

    def plant(folder: Path, ran: Path) -> None:
        (folder / at).parent.mkdir(parents=True, exist_ok=True)
        (folder / at).write_text(code(ran))
        record = json.loads((folder / MANIFEST).read_text())
        source = {"spec": spec.format(folder), "seed": 0, "hashes": {Path(at).name: hash_file(folder / at)}}
        record = {key: value for key, value in record.items() if key not in SEALED}
        write_manifest(folder, MANIFEST, {**record, "source": source, **changes})

    return plant


def beside(*names: str, **changes: Any) -> Plant:
    """Code under names that somebody might import."""

    def plant(folder: Path, ran: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(code(ran))
        record = json.loads((folder / MANIFEST).read_text())
        record = {key: value for key, value in record.items() if key not in SEALED}
        write_manifest(folder, MANIFEST, {**record, **changes})

    return plant


def pickled(name: str, keep: bool = False) -> Plant:
    def plant(folder: Path, ran: Path) -> None:
        if not keep:
            (folder / MANIFEST).unlink()
            (folder / "model.onnx").unlink()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / name).write_bytes(pickle.dumps(Evil(ran)))

    return plant


def remote(folder: Path, ran: Path) -> None:
    (folder / "modeling_evil.py").write_text(code(ran))
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    config = {"model_type": "evil", "auto_map": dict.fromkeys(names, "modeling_evil.Model")}
    (folder / "config.json").write_text(json.dumps({**config, "trust_remote_code": True}))


def template(text: str) -> Plant:
    def plant(folder: Path, ran: Path) -> None:
        (folder / "chat_template.jinja").write_text(text.replace("RAN", str(ran)))

    return plant


def text_of(meta: str) -> Plant:
    """IR text in the place of the model folder's graph."""

    def plant(folder: Path, ran: Path) -> None:
        for name in (MANIFEST, "model.onnx"):
            (folder / name).unlink()
        (folder / "evil.py").write_text(code(ran))
        (folder / "model.weft").write_text(f"graph g {{\n  {meta.format(folder)}\n}}\n")
        (folder / PROVENANCE).write_text(json.dumps({"source": {"spec": str(folder / "evil.py")}}))

    return plant


def custom_ops(folder: Path, ran: Path) -> None:
    (folder / "evil.so").write_bytes(b"\x7fELF")
    config = {"decoder": {"filename": "model.onnx", "session_options": {"custom_ops_library": str(folder / "evil.so")}}}
    (folder / "genai_config.json").write_text(json.dumps({"model": {**config, "vocab_size": 12, "context_length": 64}}))
    (folder / MANIFEST).unlink()


def foreign_op(folder: Path, ran: Path) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    model.graph.node[0].domain = str(folder / "evil")
    model.opset_import.add(domain=str(folder / "evil"), version=1)
    onnx.save(model, folder / "model.onnx")


PAYLOADS: dict[str, Plant] = {
    "a source by an absolute name": named("{}/evil.py"),
    "a source and an object of it": named("{}/evil.py:model"),
    "a source by a relative name": named("downloaded/evil.py"),
    "a source deeper down": named("{}/model/evil.py", "model/evil.py"),
    "a source by way of its parent": named("{}/x/../evil.py"),
    "a source called after a command": named("{}/compile.py", "compile.py"),
    "a source of a folder of PyTorch": named("{}/evil.py", target="torch", outputs=["logits"]),
    "a folder that claims to be of PyTorch": beside("model.py", "load.py", target="torch", outputs=["logits"]),
    "its decode step": beside("decode.py", "kernels/__init__.py", target="torch", outputs=["logits"]),
    "an encoder that claims to be of PyTorch": beside(
        "model.py", target="torch", kind="encoder", outputs=["last_hidden_state"]
    ),
    "a model.py beside an ONNX model": beside("model.py", "load.py", "generate.py", "decode.py"),
    "a source that is the folder itself": named("{}", "model.py"),
    "a pipeline read from a file": named("{}/evil.py", pipeline="@evil.py"),
    "modules of Python": beside("json.py", "os.py", "re.py", "ast.py", "typing.py", "sitecustomize.py"),
    "modules that weft imports": beside("numpy.py", "onnx.py", "onnxruntime.py", "tokenizers.py", "weft.py"),
    "modules that workers import": beside("jinja2.py", "jinja2/__init__.py", "ruff.py", "ruff/__main__.py"),
    "files that tools run": beside("conftest.py", "setup.py", "__init__.py", "__main__.py"),
    "a pickled checkpoint": pickled("pytorch_model.bin"),
    "a pickled model": pickled("model.pt"),
    "a pickle called safetensors": pickled("model.safetensors"),
    "pickled arguments beside a model": pickled("training_args.bin", keep=True),
    "a pickled array": pickled("model.npy"),
    "a pickled adapter": pickled("adapter_model.bin"),
    "code of the hub": remote,
    "a template that reaches for classes": template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "a template that reaches for globals": template("{{ cycler.__init__.__globals__.os.mkdir('RAN') }}"),
    "a template that formats attributes": template(
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}"
    ),
    "a template that reaches a function's": template(
        "{{ strftime_now.__globals__['__builtins__']['__import__']('os').mkdir('RAN') }}"
    ),
    "a template that imports": template("{% import 'os' as os %}{{ os.mkdir('RAN') }}"),
    "a model folder that names code": text_of('meta source = {{"format": "weft", "path": "{}/evil.py"}}'),
    "IR text that names a checkpoint of code": text_of(
        'meta source = {{"path": "{}/evil.py"}}\n  param %w: f32[2] = source("w")\n  output y = %w'
    ),
    "a library of operators": custom_ops,
    "an operator of a foreign domain": foreign_op,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled folder with a tokenizer's files."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "tiny.py").write_text(TINY)
    done("compile", folder / "tiny.py", "-o", folder / "out", "--max-length", 16)
    return folder / "out"


@pytest.mark.halved
@pytest.mark.parametrize("name", PAYLOADS)
def test_commands_do_not_run_code_of_folders(
    name: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ran = tmp_path / "downloaded", tmp_path / "ran"
    shutil.copytree(sound, folder)
    PAYLOADS[name](folder, ran)
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "text.txt").write_text("hello")
    if name.startswith("a template"):
        with contextlib.suppress(WeftError):
            assert ChatTemplate(folder).render([{"role": "user", "content": "hello"}]).strip() in ("", "[]")
        assert not ran.exists()
    for place in (tmp_path, folder):  # also where the working folder is the hostile one
        monkeypatch.chdir(place)
        given = COMMANDS if place == tmp_path else COMMANDS[:4]
        for command in each(2, given, first=[*PAYLOADS].index(name) % 2):
            result = weft_command(*(a.format(folder) for a in command))
            assert result.exit_code in (0, 1, 2), (command, result.output)
            assert not ran.exists(), command
        if place == folder and name.startswith("modules"):
            (tmp_path / "arch.py").write_text(TINY)
            done("compile", tmp_path / "arch.py", "--target", "torch", "-o", tmp_path / "torch", "--max-length", 16)
            assert not ran.exists()


def test_trusted_code_runs(sound: Path, tmp_path: Path) -> None:
    """The payloads are real: with --trust they would do what they say."""
    for name in ("a source by an absolute name", "a folder that claims to be of PyTorch"):
        folder, ran = tmp_path / name, tmp_path / f"ran {name}"
        shutil.copytree(sound, folder)
        PAYLOADS[name](folder, ran)
        weft_command("verify", folder, "--tokens", "1", "--trust")
        assert ran.exists()


# --- what steers terminals

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202egnp"


def test_control_characters_in_names_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(TINY)
    hostile = tmp_path / f"a{HOSTILE}"
    hostile.mkdir()
    (hostile / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    (hostile / "g.weft").write_text(f"graph g {{ meta {HOSTILE} = 1 }}")
    commands = [
        ("inspect", hostile),
        ("inspect", f"{HOSTILE}.gguf"),
        ("opt", hostile / "g.weft"),
        ("opt", "model.py", "-p", HOSTILE),
        ("compile", "model.py", "-o", hostile),
        ("compile", "model.py", "-o", "out", "--target", HOSTILE),
        (HOSTILE,),
        ("viz", "model.py", "-o", f"{HOSTILE}.html"),
        ("ops", HOSTILE),
    ]
    for command in commands:
        result = weft_command(*command)
        assert not {c for c in result.output if not c.isprintable()} - {"\n", "\t"}, command
        assert "\u202e" not in result.output, command


def test_printed_names_are_always_escaped() -> None:
    """Commands print by `shown` only: echo, note, table, render, progress."""
    import ast

    from weft.frontends.app import cli

    for path in sorted(Path(next(iter(cli.__path__))).glob("*.py")):
        if path.name in ("terminal.py", "completion.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "click.echo", "click.secho", "sys.stderr.write"), (
                    f"{path.name}: {called}"
                )
                if called == "sys.stdout.write":
                    (argument,) = node.args
                    assert isinstance(argument, ast.Constant) or "escape_controls" in ast.unparse(argument), path.name
