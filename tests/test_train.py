"""examples/train.py: any model, any text; a run that was interrupted goes on bit by bit.

``WEFT_TESTS=all`` trains each model for 300 steps, `make test` for a few.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import weft

from .sampling import ALL

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
STEPS = 300 if ALL else 12
MODELS = """
from weft import *

experts = Decoder(
    vocab=64, dim=32, layers=2, context=64,
    block=Block(
        Attention(heads=4, kv_heads=2, rope=RoPE(1e4)), MoE(4, 48, 2, router=Router(aux_loss=0.01)), norm=RMSNorm()
    ),
)
corrected = Decoder(
    vocab=256, dim=32, layers=1, context=64,
    block=Block(Attention(heads=4), MoE(4, 48, 2, router=Router(scoring="sigmoid", correction=True)), norm=RMSNorm()),
)
states = Decoder(
    vocab=256, dim=32, context=64,
    layers=[Block(Mamba(64, state=8), None, RMSNorm()), Block(Attention(heads=2), GatedMLP(64), RMSNorm())],
)
learned = Decoder(
    vocab=256, dim=32, layers=2, positions=LearnedPositions(64), tie_embeddings=True,
    block=Block(DifferentialAttention(heads=4), MLP(64, "relu2"), LayerNorm()),
)
block = Block(Attention(heads=4), MLP(64), RMSNorm())
ranked = Decoder(vocab=256, dim=32, context=64, layers=[block, MixtureOfDepths(block, 8, aux_loss=0.01)])
signed = Decoder(vocab=256, dim=32, context=64, layers=[block, MixtureOfDepths(block)])
"""
SHORT = ["--batch", "4", "--context", "32", "--warmup", "5", "--dropout", "0.1", "--every", "100"]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """examples/train.py."""
    sys.path.insert(0, str(EXAMPLES))
    import train

    yield train
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("models") / "models.py"
    file.write_text(MODELS)
    return file


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    script.main()


def rows(folder: Path) -> list[dict[str, str]]:
    """The log, without how fast it went."""
    with (folder / "log.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in csv.DictReader(file)]


def test_initialization_schemes_set_their_variances(
    script: ModuleType, models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """muP's rates reach the optimizer, each parameter once; matrices alone decay."""
    model = weft.initialize(f"{models}:experts", "mup", width=8)
    net, rates = weft.torch(model), weft.learning_rates(model, 8)
    names = {id(p): name for name, p in net.named_parameters()}
    groups = script.parameter_groups(net, 0.1, rates)
    seen = {names[id(p)]: (group["factor"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(seen) == len(names)
    assert seen["layers.0.attn.q.weight"] == (0.25, 0.1) and seen["embed.weight"] == (1.0, 0.1)
    assert seen["final_norm.weight"] == (1.0, 0.0)
    first = {}
    for scheme in ("depth", "mup"):
        folder = tmp_path / scheme
        run(
            script,
            monkeypatch,
            f"{models}:experts",
            "-o",
            folder,
            "--steps",
            2,
            *SHORT,
            "--init",
            scheme,
            "--mup-width",
            8,
        )
        first[scheme] = [float(row["loss"]) for row in rows(folder)]
    assert first["depth"] != first["mup"]
    with pytest.raises(SystemExit, match="which muP initializes differently"):
        run(script, monkeypatch, f"{models}:learned", "-o", tmp_path / "tied", "--steps", 2, *SHORT, "--init", "mup")


@pytest.mark.parametrize("name", ["experts", "corrected", "states", "learned", "ranked"])
def test_interrupted_run_resumes_bit_identical(
    name: str, script: ModuleType, models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    half, save = STEPS // 2, script.save
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def save_and_copy(folder: Path, net: Any, optimizer: Any, step: int, data: Any) -> None:
        save(folder, net, optimizer, step, data)
        if step == half:  # as a run leaves it that is interrupted a step later
            shutil.copytree(folder, parts)
            with (parts / "log.csv").open("a") as file:
                file.write(f"{half + 1},9,9,9,9,9\n")

    options = [*SHORT, "--steps", STEPS, "--save-every", half, "--accumulate", 2]
    options += ["--compile-as", f"{models}:signed"] if name == "ranked" else []
    with monkeypatch.context() as patched:
        patched.setattr(script, "save", save_and_copy)
        patched.setattr(script, "finish", lambda *operands: None)
        run(script, monkeypatch, f"{models}:{name}", "-o", whole, *options)
    again = ["--compile-as", f"{models}:signed"] if name == "ranked" else []
    run(script, monkeypatch, f"{models}:{name}", "--resume", parts, *again)
    assert rows(parts) == rows(whole)
    one, two = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, parts))
    assert one["step"] == two["step"] == STEPS
    assert all(torch.equal(two["model"][key], value) for key, value in one["model"].items())
    numbers = rows(whole)
    assert len(numbers) == STEPS
    assert float(numbers[-1]["loss"]) < float(numbers[0]["loss"])
    assert all((float(row["aux_loss"]) > 0) == (name in ("experts", "ranked")) for row in numbers)
    assert float(numbers[0]["lr"]) == pytest.approx(2e-3 / 5)
    assert len(weft.load(parts / "model").generate([list(b"And")], max_tokens=4)[0].tokens) == 4


def test_tokenizer_is_trained_on_the_text(
    script: ModuleType, models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It says the text again; the architecture gets its vocabulary."""
    options = [*SHORT, "--steps", 2, "--tokenizer", "bpe:400", "--bf16", "--schedule", "constant"]
    run(script, monkeypatch, f"{models}:experts", "-o", tmp_path, *options)
    tokenizer = script.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 400
    text = "And king David said — ça ira\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    manifest = json.loads((tmp_path / "model" / "weft.json").read_text())
    assert manifest["vocab"] == 400


def test_untrainable_sources_are_refused(
    script: ModuleType, models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(SystemExit, match="fewer than a window of 33"):
        run(script, monkeypatch, f"{models}:states", "-o", tmp_path / "a", *SHORT, "--text", tmp_path / "short.txt")
    with pytest.raises(SystemExit, match=r"train\.py: error: .*nothing"):
        run(script, monkeypatch, "nothing.py:model", "-o", tmp_path / "b", *SHORT)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SystemExit, match="--tensorboard needs the package tensorboard"):
        run(script, monkeypatch, f"{models}:states", "-o", tmp_path / "c", *SHORT, "--tensorboard")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "bytes": lambda data: data[: len(data) // 2] + b"\xff\xfe\x00{" + data[len(data) // 2 :],
    "text": lambda data: b"no checkpoint",
    "list": lambda data: b"[1]",
    "other keys": lambda data: b'{"steps": [1], "batch": {"a": 1}}',
    "other rows": lambda data: b"step,loss\nx,1\n",
    "pickle": lambda data: b"cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.parametrize("file", ["checkpoint.pt", "settings.json", "tokenizer.json", "log.csv"])
def test_a_damaged_run_is_refused_with_the_file(
    file: str,
    script: ModuleType,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "finish", lambda *operands: None)
    run(script, monkeypatch, f"{models}:states", "-o", tmp_path, "--steps", 1, *SHORT)
    sound = (tmp_path / file).read_bytes()
    for name, damage in DAMAGE.items():
        if file == "log.csv" and name != "other rows":
            continue  # lines may be missing
        (tmp_path / file).write_bytes(damage(sound))
        with pytest.raises(SystemExit) as ended:
            run(script, monkeypatch, f"{models}:states", "--resume", tmp_path, "--steps", 2)
        message = capsys.readouterr().err.splitlines()[-1] if ended.value.code == 2 else str(ended.value.code)
        assert "train.py: error: " in message and "\n" not in message, (name, message)
        assert file in message or "--steps" in message or "unrecognized" in message, (name, message)
        (tmp_path / file).write_bytes(sound)


def test_settings_of_a_run_cannot_execute_code(
    script: ModuleType,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "finish", lambda *operands: None)
    run(script, monkeypatch, f"{models}:states", "-o", tmp_path, "--steps", 1, *SHORT)
    evil = tmp_path / "evil.py"
    evil.write_text("raise SystemExit('it ran')")
    settings = json.loads((tmp_path / "settings.json").read_text())
    for key in ("model", "compile_as"):
        for spec in (f"{evil}", f"{evil}:model"):
            (tmp_path / "settings.json").write_text(json.dumps(settings | {key: spec}))
            own = [] if key == "model" else [f"{models}:states"]
            with pytest.raises(SystemExit) as ended:
                run(script, monkeypatch, *own, "--resume", tmp_path, "--steps", 2)
            assert ended.value.code == 2
            assert f"names code, {spec}" in capsys.readouterr().err


def test_several_processes_reach_the_same_weights(
    script: ModuleType, models: Path, warm: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FSDP2 among two processes goes on with the run of one: the losses of one, but for the order of sums."""
    options = [f"{models}:experts", *SHORT[:6], "--save-every", 2]
    # The run of two processes begins where the other stood after two steps.
    with monkeypatch.context() as patched:
        patched.setattr(script, "finish", lambda *operands: None)
        run(script, monkeypatch, *options, "-o", tmp_path / "half", "--steps", 2, "--schedule", "constant")
        run(script, monkeypatch, *options, "-o", tmp_path / "whole", "--steps", 4, "--schedule", "constant")
    launch = [str(shutil.which("torchrun", path=warm["PATH"])), "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(EXAMPLES / "train.py"), options[0], "--resume", str(tmp_path / "half"), "--steps", "4"]
    subprocess.run(command, check=True, capture_output=True, env=warm)
    two, one = rows(tmp_path / "half"), rows(tmp_path / "whole")
    assert [row["step"] for row in two] == ["1", "2", "3", "4"]
    for a, b in zip(one, two, strict=True):
        # aux_loss compares the tokens of a process, not of all.
        for key in ("step", "loss", "lr", "gradient"):
            assert float(a[key]) == pytest.approx(float(b[key]), rel=1e-4)
    assert (tmp_path / "half" / "model" / "weft.json").is_file()
