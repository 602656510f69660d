"""Generated PyTorch modules on a GPU: against themselves in f32 on the CPU, in pieces, and their decode steps.

Needs no pytest: `python benchmarks/gpu tests --only tests/torch` runs all side by side. With --device cpu there are
no graphs; that much checks the checks themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from chosen import DEVICE
from decoders import DECODERS, LAYERS, RECURRENT, VOCAB
from gpu.limits import capture
from torch import Tensor

from weft.backends.folder_facts import FolderFacts
from weft.backends.runtime.core.generation import Generator
from weft.backends.runtime.torch.expert_offloading import offload_experts
from weft.backends.runtime.torch.torch_decoder import TorchDecoder
from weft.backends.target import TARGETS
from weft.backends.torch.package.module import build_module, build_step
from weft.frontends.app.api.modules import build_step_graphs
from weft.frontends.app.api.source.sources import load_source
from weft.ir import Graph
from weft.passes import run_passes

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
CUDA = DEVICE == "cuda"
FP8 = ", fp8"  # ends the name of a decoder whose caches are in it
READING = [n for n in DECODERS if n != "window" and not n.startswith("experts")]  # those whose step reads prompts
STEPS = 40 if CUDA else 8  # that decode: the CPU checks the checks
ROUNDINGS = 10  # of the numbers of a layer on their way


@cache
def graph(name: str) -> Graph:
    """Return the graph of the decoder `name`, which does not depend on the dtype of its caches."""
    found = load_source({**DECODERS, **RECURRENT}[name.removesuffix(FP8)]).graph
    return run_passes(found, TARGETS["torch"].pipeline(found, "f32"))


@cache
def forms(name: str) -> dict[str, Graph]:
    """The forms of a decoder that its module and its decode step are made of."""
    return build_step_graphs(graph(name))


@cache
def model(name: str, dtype: str, device: str = DEVICE) -> Any:
    """The module; in f32 on the CPU it is the reference of the others."""
    return build_module(forms(name), dtype=DTYPES[dtype], device=device, float8_caches=name.endswith(FP8)).eval()


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def near(got: Tensor, want: Tensor, dtype: str, what: str, ways: int = 1) -> None:
    """Relative to the norm of the logits: roundings of random sign, each at most half an eps, on so many `ways`."""
    allowed = torch.finfo(DTYPES[dtype]).eps * (ROUNDINGS * LAYERS) ** 0.5 / 2 * ways
    allowed = max(allowed, 16 * torch.finfo(torch.float32).eps * LAYERS)  # sums in another order
    got, want = got.double().cpu(), want.double().cpu()
    error = float((got - want).norm() / want.norm())
    print(f"  {what} {dtype}: error {error:.2e} of {allowed:.2e}")
    assert got.isfinite().all() and error <= allowed, what


def in_pieces(net: Any, ids: Tensor, cuts: list[int]) -> Tensor:
    """Logits [batch, seq, vocab] of `ids` given piece after piece through a cache."""
    kept, length = net.new_cache(len(ids), ids.shape[1]), ids.shape[1]
    ends = [*cuts, length]
    return torch.cat([net(ids[:, a:b], cache=kept) for a, b in zip([0, *cuts], ends, strict=True)], 1)


def check_module(name: str, dtype: str) -> None:
    """Logits of all tokens, at once and in pieces, as in f32 on the CPU."""
    ids = tokens(2, 90)
    want = model(name, "f32", "cpu")(ids)
    near(model(name, dtype)(ids.to(DEVICE)), want, dtype, name)
    near(in_pieces(model(name, dtype), ids.to(DEVICE), [40, 41, 42, 88, 89]), want, dtype, f"{name} in pieces")


def generated(net: Any) -> Any:
    """The Python module that the text of `net` makes."""
    return sys.modules[type(net).__module__]


@contextmanager
def calls(net: Any, part: str) -> Iterator[list[int]]:
    """Record the number of tokens of each call of `part` of `net`, a kernel or a function of its source."""
    source, found = generated(net), list[int]()
    real = vars(source)[part]

    def counted(q: Tensor, *more: Any, **options: Any) -> Any:
        found.append(q.shape[2])
        return real(q, *more, **options)

    setattr(source, part, counted)
    try:
        yield found
    finally:
        setattr(source, part, real)


def check_window_kernel(name: str, dtype: str) -> None:
    """The kernel for windows reads all pieces of several tokens that follow one another; other rows take masks."""
    ids, net = tokens(2, 300, seed=7), model(name, dtype)
    want, given = model(name, "f32", "cpu")(ids), ids.to(DEVICE)
    with calls(net, "window_attention") as read:
        near(in_pieces(net, given, [40, 41, 200]), want, dtype, f"{name} in pieces")
        assert read == ([40] * LAYERS + [159] * LAYERS + [100] * LAYERS if CUDA else [])
        at = torch.arange(300, device=DEVICE).expand(2, -1)
        near(net(given, position_ids=at), want, dtype, f"{name} by masks")
        assert len(read) == 3 * LAYERS * CUDA


@torch.enable_grad()
def check_training(name: str, dtype: str) -> None:
    """Gradients by flex_attention as in f32 on the CPU; also with activations made again, and from f32 by autocast."""
    torch.compiler.reset()
    ids = tokens(2, 300, seed=8)
    want = gradients(build_module(forms(name)), ids)
    ways = [(dtype, False, False), (dtype, True, False), *([("f32", False, True)] if dtype == "bf16" else [])]
    for kind, again, lowered in ways:
        net: Any = build_module(forms(name), dtype=DTYPES[kind], device=DEVICE)
        net.checkpointing = again
        with calls(net, "flex") as flexed, torch.autocast(DEVICE, torch.bfloat16, enabled=lowered):
            got = gradients(net, ids.to(DEVICE))
        assert flexed == [300] * (LAYERS * (1 + again) if CUDA else 0)
        near(got, want, dtype, f"{name} gradients{', again' * again}{', autocast' * lowered}", ways=2)  # there and back


def gradients(net: Any, ids: Tensor) -> Tensor:
    """All gradients of what predicts the next token, one after the other."""
    logits = net(ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    return torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, list(net.parameters()))])


def stepping(name: str, dtype: str, rows: int, length: int) -> tuple[Any, Any, Callable[[Tensor, Tensor, Any], Tensor]]:
    """A module of its own, its cache, and its decode step."""
    fp8 = name.endswith(FP8)
    net: Any = build_module(forms(name), dtype=DTYPES[dtype], device=DEVICE, float8_caches=fp8).eval()
    return net, net.new_cache(rows, length), build_step(forms(name), net, float8_caches=fp8)


def check_step(name: str, dtype: str, capacity: int = 110, ways: int = 1) -> None:
    """Steps of two rows after a prompt: logits as in f32 on the CPU, for windows of 64 tokens too."""
    past = capacity - 10
    ids = tokens(2, capacity, seed=1)
    kept = model(name, "f32", "cpu").new_cache(2, capacity)
    want = model(name, "f32", "cpu")(ids, cache=kept)[:, past - 1 :]
    net, kept, step = stepping(name, dtype, 2, capacity)
    given = ids.to(DEVICE)
    rows = [net(given[:, :past], cache=kept)[:, -1]]
    for at in range(past, capacity):
        position = torch.full((2, 1), at, device=DEVICE)
        rows.append(step(given[:, at : at + 1], position, kept)[:, -1])
    near(torch.stack(rows, 1), want, dtype, f"{name} step by step", ways)


def check_prompt(name: str, dtype: str) -> None:
    """A prompt that the step reads, in pieces of many tokens and of few."""
    ids = tokens(2, 200, seed=10)
    want = model(name, "f32", "cpu")(ids)
    _, kept, step = stepping(name, dtype, 2, 200)
    assert step.reads_prompts
    given, rows, ends = ids.to(DEVICE), [], (90, 91, 99, 130, 200)
    for a, b in zip((0, *ends), ends, strict=False):
        rows.append(step(given[:, a:b], torch.arange(a, b, device=DEVICE).expand(2, -1), kept))
    near(torch.cat(rows, 1), want, dtype, f"{name} prompt by the step")


def check_short_cache(name: str, dtype: str) -> None:
    """A cache may hold less than a window does."""
    check_step(name, dtype, capacity=40)


def check_float8_caches(name: str, dtype: str) -> None:
    """Caches of FP8, whose kernels round as the module does; but a number between two floats may go either way."""
    check_step(name + FP8, dtype, ways=8)


def check_compiled(name: str, dtype: str) -> None:
    """The whole module as torch.compile makes it, with the kernels that it calls."""
    torch.compiler.reset()
    net = torch.compile(model(name, dtype), fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    for length in (90, 300):
        ids = tokens(2, length, seed=9)
        near(net(ids.to(DEVICE)), model(name, "f32", "cpu")(ids), dtype, f"{name} compiled, {length} tokens")


def advancing(name: str, dtype: str, capacity: int) -> tuple[Callable[[Tensor], None], Callable[[], None], Tensor]:
    """A decoder that feeds itself: reads a prompt, makes a token; and its logits [1, vocab] and token, as f32."""
    net, kept, step = stepping(name, dtype, 1, capacity)
    token, position = (torch.zeros(1, 1, dtype=torch.long, device=DEVICE) for _ in range(2))
    shown = torch.zeros(1, VOCAB + 1, device=DEVICE)

    def start(ids: Tensor) -> None:
        kept.length = 0
        token.copy_(net(ids, cache=kept)[:, -1].argmax(-1, keepdim=True))
        position.fill_(ids.shape[1])

    def advance() -> None:
        logits = step(token, position, kept)[:, -1]
        token.copy_(logits.argmax(-1, keepdim=True))
        shown[:, :VOCAB].copy_(logits)
        shown[:, VOCAB:].copy_(token)
        position.add_(1)

    return start, advance, shown


def check_replay(name: str, dtype: str) -> None:
    """A captured step that feeds itself makes the tokens and logits of one that is launched, bit for bit."""
    ids = tokens(1, 50, seed=2).to(DEVICE)
    runs = []
    for graphed in (False, True):
        start, run, shown = advancing(name, dtype, 100)
        run = capture([run]) if graphed else run
        found = []
        for prompt in (ids, ids.flip(1)):  # the second goes through what the first captured
            start(prompt)
            for _ in range(STEPS):
                run()
                found.append(shown.clone())
        runs.append(torch.stack(found))
    assert torch.equal(*runs)


def check_greedy(name: str, dtype: str) -> None:
    """Tokens chosen by decode steps rank first in the module's own logits, up to rounding."""
    made = tokens(1, 50, seed=3).to(DEVICE)
    start, advance, shown = advancing(name, dtype, 110)
    start(made)
    for _ in range(STEPS):
        advance()
        made = torch.cat([made, shown[:, VOCAB:].long()], 1)
    first = model(name, dtype)(made[:, :50])[:, -1].argmax(-1)
    text = torch.cat([made[:, :50], first[:, None], made[:, 50:]], 1)
    logits = model(name, dtype)(text)[0, 50:-1].double()
    chosen = logits.gather(1, text[0, 51:, None])[:, 0]
    slack = 8 * torch.finfo(DTYPES[dtype]).eps * (ROUNDINGS * LAYERS) ** 0.5 / 2 * logits.std(-1)
    assert (logits.max(-1).values - chosen <= slack).all()


def check_runtime(name: str, dtype: str) -> None:
    """The runtime generates what a step that feeds itself makes, whether tokens are drawn on the device or not."""
    prompt = tokens(1, 50, seed=4)
    start, advance, shown = advancing(name, dtype, 110)
    start(prompt.to(DEVICE))
    want = []
    for _ in range(STEPS):
        advance()
        want.append(int(shown[0, VOCAB]))
    for draws in (False, True):
        net: Any = build_module(forms(name), dtype=DTYPES[dtype], device=DEVICE).eval()
        step = build_step(forms(name), net)
        facts = FolderFacts(Path(), (Path("model.py"),), "decoder", "torch", VOCAB, 110)
        decoder = TorchDecoder(net, facts, step=step, draws=draws)
        (result,) = Generator(decoder).generate([prompt[0].tolist()], max_tokens=STEPS + 1)
        assert result.tokens[1:] == want, f"draws={draws}"


class AtOnce:
    """The stream of copies where there is no GPU."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for there, here in pairs:
            there.copy_(here)

    def wait(self, mark: None) -> None:
        pass


def check_offloaded(name: str, dtype: str, most: int) -> None:
    """With a few experts of each mixture in slots, a text read and then decoded has the logits of the whole model."""
    ids = tokens(1, 60, seed=5)
    net: Any = build_module(forms(name), dtype=DTYPES[dtype]).eval()
    offloaded = offload_experts(net, most, DEVICE, name, None if CUDA else AtOnce())
    found = in_pieces(net, ids.to(DEVICE), [*range(30, 60)])
    near(found, model(name, "f32", "cpu")(ids), dtype, f"{name}, {most} experts on the device")
    assert offloaded.counts.found < offloaded.counts.asked and offloaded.counts.bytes > 0


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every check by name."""
    for dtype in DTYPES:
        for name in DECODERS:
            for check in (check_module, check_step, check_greedy, check_replay, check_runtime):
                yield f"{check.__name__[6:]}-{name}-{dtype}", partial(check, name, dtype)
        for name in RECURRENT:
            # A convolution, norms of keys and gates round more often than attention does, in the module, too.
            yield f"step-{name}-{dtype}", partial(check_step, name, dtype, ways=2)
            yield f"replay-{name}-{dtype}", partial(check_replay, name, dtype)
        for name in READING:
            yield f"prompt-{name}-{dtype}", partial(check_prompt, name, dtype)
        for name in (name for name in DECODERS if name.startswith("experts")):
            for most in (1, 3):
                yield f"offloaded_{most}-{name}-{dtype}", partial(check_offloaded, name, dtype, most)
        yield f"short_cache-{dtype}", partial(check_short_cache, "window", dtype)
        for name in ("window", "softcap", "sinks"):
            yield f"window_kernel-{name}-{dtype}", partial(check_window_kernel, name, dtype)
            yield f"training-{name}-{dtype}", partial(check_training, name, dtype)
            yield f"compiled-{name}-{dtype}", partial(check_compiled, name, dtype)
        for name in ("grouped", "window"):
            yield f"float8_caches-{name}-{dtype}", partial(check_float8_caches, name, dtype)


def pytest_generate_tests(metafunc: Any) -> None:
    found = dict(checks())
    metafunc.parametrize("check", found.values(), ids=found)


def test_on_the_gpu(check: Callable[[], None]) -> None:
    with torch.no_grad():
        check()
