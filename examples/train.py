"""Train any model that weft knows on any text: an architecture file, a preset, a checkpoint.

python examples/train.py examples/local_global.py --text book.txt --tokenizer bpe:4096 -o runs/first
python examples/train.py examples/local_global.py --resume runs/first --steps 2000
torchrun --nproc-per-node 2 examples/train.py examples/hybrid.py --text book.txt -o runs/second

The folder holds the tokenizer, a checkpoint, log.csv, and at the end the compiled model: `weft run runs/first/model`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import weft
from weft.frontends.app.api.source.sources import find_architecture_file
from weft.frontends.model import Model

TEXT = Path(__file__).parent / "texts" / "kings.txt"
CHECKPOINT, SETTINGS, LOG, TOKENIZER = "checkpoint.pt", "settings.json", "log.csv", "tokenizer.json"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # every process has, or reads, all numbers
# Weights that no loss reaches, as those that correct the choice of experts, have no state of the optimizer.
SOME = dataclasses.replace(WHOLE, strict=False)


# -- text


def tokenizer_for(spec: str, text: str) -> Tokenizer:
    """The tokenizer that `spec` names: ``bytes``, ``bpe:N`` trained on `text`, or a tokenizer.json or its folder."""
    if spec == "bytes" or spec.startswith("bpe:"):
        size = 256 if spec == "bytes" else int(spec.removeprefix("bpe:"))
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=spec != "bytes")
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
        return tokenizer
    path = Path(spec)
    return Tokenizer.from_file(str(path / TOKENIZER if path.is_dir() else path))


def fitted(model: Model, vocab: int) -> Model:
    """`model` with at least `vocab` tokens: an architecture gets them, a checkpoint must have them."""
    known = model.graph.meta["vocab"]
    if known >= vocab:
        return model
    if not (model.random_init and hasattr(model.module, "vocab")):
        sys.exit(f"{model.spec} has {known} tokens, but the tokenizer makes {vocab}: choose another --tokenizer")
    return weft.load_source(dataclasses.replace(model.module, vocab=vocab), model.seed)


def loaded(spec: str, seed: int) -> Model:
    """The model of `spec`, its weights drawn with `seed` where it is an architecture."""
    model = weft.load_source(spec)
    return weft.load_source(spec, seed) if model.random_init and model.module is not None else model


class Windows:
    """Random windows of a text, [batch, length + 1], for ever; `state` is where it stands."""

    def __init__(self, tokens: Tensor, batch: int, length: int, seed: int) -> None:
        if len(tokens) <= length:
            sys.exit(f"the text has {len(tokens)} tokens, fewer than a window of {length + 1}: lower --context")
        self.windows, self.batch = tokens.unfold(0, length + 1, 1), batch
        self.random = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.windows[torch.randint(len(self.windows), (self.batch,), generator=self.random)]


def losses(net: nn.Module, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy in nats of every token, given those before it, and the losses that layers add (of experts)."""
    made = net(windows[:, :-1])
    logits, *more = made if isinstance(made, tuple) else (made,)
    entropy = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
    return entropy, sum(more, torch.zeros((), device=entropy.device))


def rate(step: int, given: argparse.Namespace) -> float:
    """The learning rate of `step`: a straight line up, then a cosine, or nothing, down to a tenth."""
    if step < given.warmup:
        return given.lr * (step + 1) / given.warmup
    if given.schedule == "constant":
        return given.lr
    done = (step - given.warmup) / max(given.steps - given.warmup, 1)
    return given.lr * (0.55 + 0.45 * math.cos(math.pi * min(done, 1.0)))


def parameter_groups(net: nn.Module, decay: float, rates: dict[str, float]) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors (norms, biases), which do not; `factor` is that of the learning rate, of those
    in `rates` by name."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in net.named_parameters():
        groups.setdefault((decay if p.dim() > 1 else 0.0, rates.get(name, 1.0)), []).append(p)
    return [{"params": of, "weight_decay": decay, "factor": factor} for (decay, factor), of in groups.items()]


def drop_out(net: nn.Module, share: float) -> None:
    """Drop `share` of what every sublayer adds to the residual stream while `net` trains (Vaswani 2017)."""

    def hook(module: nn.Module, operands: Any, made: Any) -> Any:
        return F.dropout(made, share, module.training) if isinstance(made, Tensor) else made

    for name, module in net.named_modules():
        if name.rpartition(".")[2] in ("attn", "cross", "ffn", "mixer"):
            module.register_forward_hook(hook)


# -- files


FIELDS = ("step", "loss", "aux_loss", "lr", "gradient", "tokens_per_second")


class Log:
    """A row a step in log.csv, and in TensorBoard if asked for; rows after `step` are forgotten."""

    def __init__(self, folder: Path, step: int, tensorboard: bool) -> None:
        self.path, self.board = folder / LOG, _board(folder / "tensorboard") if tensorboard else None
        kept = [row for row in _rows(self.path) if row.keys() == set(FIELDS) and int(row["step"]) <= step]
        with self.path.open("w", newline="") as file:
            rows = csv.DictWriter(file, FIELDS)
            rows.writeheader()
            rows.writerows(kept)

    def __call__(self, step: int, **numbers: float) -> None:
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, FIELDS).writerow({"step": step, **{name: repr(v) for name, v in numbers.items()}})
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        sys.exit("--tensorboard needs the package tensorboard: pip install tensorboard")
    return SummaryWriter(str(folder))


def _rows(path: Path) -> Iterable[dict[str, str]]:
    if not path.is_file():
        return []
    try:
        with path.open(newline="") as file:
            return [row | {"step": str(int(row["step"]))} for row in csv.DictReader(file)]
    except (ValueError, TypeError, KeyError, csv.Error) as e:
        raise refusal(path, e) from e


def save(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, step: int, data: Windows) -> None:
    """Replace the checkpoint in `folder` by what continues from here bit by bit."""
    state = {
        "step": step,
        "model": get_model_state_dict(net, options=WHOLE),
        "optimizer": get_optimizer_state_dict(net, optimizer, options=WHOLE),
        "data": data.random.get_state(),
        "random": torch.get_rng_state(),
    }
    if first():
        torch.save(state, folder / f"{CHECKPOINT}.partial")
        os.replace(folder / f"{CHECKPOINT}.partial", folder / CHECKPOINT)  # whole, or not at all
    if dist.is_initialized():
        dist.barrier()


def restore(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, data: Windows) -> int:
    """Continue from the checkpoint in `folder`: the steps that are done."""
    try:
        state = torch.load(folder / CHECKPOINT, weights_only=True)
        set_model_state_dict(net, state["model"], options=WHOLE)
        set_optimizer_state_dict(net, optimizer, state["optimizer"], options=SOME)
        data.random.set_state(state["data"])
        torch.set_rng_state(state["random"])
        return int(state["step"])
    except Exception as e:  # PyTorch raises of any kind, whatever is damaged
        raise refusal(folder / CHECKPOINT, e) from e


def refusal(file: Path, error: Exception) -> weft.WeftError:
    """What is wrong with a file of a run, in one line."""
    words = " ".join(str(error).split())[:200] or type(error).__name__
    return weft.WeftError(f"{file}: damaged, or of another run ({words}): restore it, or begin a new run with MODEL -o")


def first() -> bool:
    """Return whether this is the process that writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def shard(net: nn.Module, device: str, bf16: bool) -> nn.Module:
    """`net` with each process holding its part of every weight, where torchrun started several; a block's weights are
    whole only while it runs."""
    if not dist.is_initialized():
        return net
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    if device == "cuda":
        torch.cuda.set_device(mesh.get_local_rank())
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def own_rows(windows: Tensor) -> Tensor:
    """Of a batch that all processes draw alike the rows of this one."""
    return windows.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else windows


def mean(value: Tensor) -> float:
    """The mean of `value` over the processes."""
    if dist.is_initialized():
        dist.all_reduce(value := value.detach().clone())
        value = value / dist.get_world_size()
    return float(value.item())


# -- the run


def train(given: argparse.Namespace) -> None:
    folder = Path(given.out)
    text = Path(given.text).read_text(encoding="utf-8")
    try:
        known = folder / TOKENIZER
        tokenizer = Tokenizer.from_file(str(known)) if known.is_file() else tokenizer_for(given.tokenizer, text)
    except Exception as e:  # tokenizers raises nothing more specific
        raise refusal(known, e) from e
    model = fitted(loaded(given.model, given.seed), tokenizer.get_vocab_size())
    if given.init:
        model = weft.initialize(model, given.init, width=given.mup_width)
    if first():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / TOKENIZER))
        (folder / SETTINGS).write_text(json.dumps(vars(given) | {"resume": None}, indent=1))

    torch.manual_seed(given.seed)
    net = weft.torch(model, device=given.device)
    net.checkpointing = given.checkpointing
    if given.dropout:
        drop_out(net, given.dropout)
    net = shard(net, given.device, given.bf16)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    held = max(len(tokens) // 20, given.context + 1)
    data = Windows(tokens[:-held], given.batch, given.context, given.seed)
    rates = weft.learning_rates(model, given.mup_width) if given.init == "mup" else {}
    optimizer = torch.optim.AdamW(parameter_groups(net, given.decay, rates), lr=given.lr, betas=(0.9, 0.95))
    step = restore(folder, net, optimizer, data) if given.resume else 0
    log = Log(folder, step, given.tensorboard) if first() else None
    if first():
        size = sum(p.numel() for p in net.parameters())
        vocab = tokenizer.get_vocab_size()
        print(f"{given.model}: {size:,} weights, {len(tokens):,} tokens of {vocab}, from step {step}")

    net.train()
    batches, autocast = iter(data), given.bf16 and not dist.is_initialized()
    while step < given.steps:
        start, entropy, added = time.perf_counter(), 0.0, 0.0
        for group in optimizer.param_groups:
            group["lr"] = rate(step, given) * group["factor"]
        optimizer.zero_grad()
        for _ in range(given.accumulate):
            windows = own_rows(next(batches)).to(given.device)
            with torch.autocast(given.device, torch.bfloat16, enabled=autocast):
                loss, more = losses(net, windows)
            ((loss + more) / given.accumulate).backward()
            entropy, added = entropy + mean(loss) / given.accumulate, added + mean(more) / given.accumulate
        gradient = nn.utils.clip_grad_norm_(net.parameters(), given.clip)
        optimizer.step()
        step += 1
        seconds = time.perf_counter() - start
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # of all processes
        if log is not None:
            speed = given.batch * given.accumulate * given.context / seconds
            lr = rate(step - 1, given)
            log(step, loss=entropy, aux_loss=added, lr=lr, gradient=float(whole), tokens_per_second=speed)
            if step % given.every == 0 or step == given.steps:
                print(f"step {step:6}  loss {entropy:.4f}  lr {lr:.2e}  {speed:,.0f} tokens/s", flush=True)
        if step % given.save_every == 0 or step == given.steps:
            save(folder, net, optimizer, step, data)
    finish(folder, model, net, tokens[-held:], given)


@torch.no_grad()
def finish(folder: Path, model: Model, net: nn.Module, held_out: Tensor, given: argparse.Namespace) -> None:
    """Print the loss on the text that was held out, and compile the model."""
    state, tokenizer = get_model_state_dict(net, options=WHOLE), Tokenizer.from_file(str(folder / TOKENIZER))
    if given.compile_as:  # the first process has the weights
        model = fitted(loaded(given.compile_as, given.seed), tokenizer.get_vocab_size())
    if given.compile_as and not first():
        return
    if first():
        model = dataclasses.replace(
            model,
            graph=weft.with_weights(model.graph, state),
            tokenizer=lambda out: tokenizer.save(str(out / TOKENIZER)),
            random_init=False,
        )
    net = weft.torch(model, device=given.device) if given.compile_as else net
    net.eval()
    windows = held_out.unfold(0, given.context + 1, given.context)
    found = [losses(net, part.to(given.device))[0].item() * len(part) for part in windows.split(given.batch)]
    if first():
        print(f"loss on held-out text {sum(found) / len(windows):.4f} nats per token")
        weft.compile(model, folder / "model", max_length=given.context)
        print(f"compiled; try `weft run {folder / 'model'} --prompt …`")


def options() -> argparse.Namespace:
    """The command line; with --resume, what the run began with, but for what is given anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="whatever weft loads: model.py, model.py:name, a preset, a folder")
    parser.add_argument("-o", "--out", help="the folder of the run")
    parser.add_argument("--resume", help="go on with the run in this folder")
    parser.add_argument(
        "--compile-as", metavar="MODEL", help="what gets the weights, if another is trained than writes"
    )
    parser.add_argument("--text", default=str(TEXT), help="a file of UTF-8")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, bpe:4096 (of the text), or a tokenizer.json")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16, help="windows a step, of all processes together")
    parser.add_argument("--accumulate", type=int, default=1, help="batches whose gradients add up to a step")
    parser.add_argument("--context", type=int, default=128, help="tokens of a window")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=50, help="steps until the learning rate is reached")
    parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay of matrices")
    parser.add_argument("--init", choices=["plain", "depth", "fan-in", "mup"], help="scheme of the initial weights")
    parser.add_argument("--mup-width", type=int, default=256, help="the width that the rates are tuned for")
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of a gradient")
    parser.add_argument("--dropout", type=float, default=0.0, help="share of each sublayer's output that is dropped")
    parser.add_argument("--bf16", action="store_true", help="products of matrices in bf16")
    parser.add_argument("--checkpointing", action="store_true", help="less memory: activations are computed again")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=50, help="steps from one printed line to the next")
    parser.add_argument("--save-every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--tensorboard", action="store_true", help="also write numbers for TensorBoard")
    given = parser.parse_args()
    if given.resume:
        file, known = Path(given.resume) / SETTINGS, {}
        try:
            known |= {key: value for key, value in json.loads(file.read_text("utf-8")).items() if value}
        except (OSError, ValueError, AttributeError) as e:
            sys.exit(f"train.py: error: {refusal(file, e)}")
        known |= {key: value for key in ("model", "compile_as") if (value := getattr(given, key))}
        for key, option in (("model", "MODEL"), ("compile_as", "--compile-as")):
            # The folder may be somebody else's, whose settings must not choose the code that runs here.
            if find_architecture_file(spec := str(known.get(key, ""))) and not getattr(given, key):
                parser.error(f"{file} names code, {spec}: to run it, name it yourself as {option}, beside --resume")
        flags = {f"--{key.replace('_', '-')}": known[key] for key in known if key not in ("model", "out", "resume")}
        read = [key + ("" if value is True else f"={value}") for key, value in flags.items()]
        given = parser.parse_args([*read, *sys.argv[1:]])
        given.model, given.out = known.get("model"), given.resume  # wherever the folder was when it began
    if not given.model or not given.out:
        parser.error("say what to train and where to: MODEL -o FOLDER, or --resume FOLDER")
    return given


def main() -> None:
    given = options()
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group()
    try:
        train(given)
    except weft.WeftError as e:
        sys.exit(f"train.py: error: {e}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # an ordinary exit may abort: caches of DTensor keep the threads of gloo (PyTorch 2.13)


if __name__ == "__main__":
    main()
