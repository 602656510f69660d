"""A Llama of 0.9 million parameters that reads characters: described, trained on two processor cores, sampled from.

python examples/train_characters.py
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

TEXT = Path(__file__).parent / "texts" / "kings.txt"
CONTEXT, BATCH, STEPS = 128, 16, 600
PEAK_RATE, WARMUP, BETAS, DECAY, CLIP = 4e-3, 50, (0.9, 0.95), 0.1, 1.0

block = Block(Attention(heads=8, rope=RoPE(10_000)), GatedMLP(352), norm=RMSNorm(1e-5))
model = Decoder(vocab=128, dim=128, layers=4, block=block, tie_embeddings=True, context=CONTEXT)


def read(path: Path) -> tuple[Tensor, Tensor]:
    """The codes of the ASCII text at `path`: nine tenths to train on, and the rest."""
    codes = torch.frombuffer(bytearray(path.read_text(encoding="ascii"), "ascii"), dtype=torch.uint8).long()
    cut = len(codes) * 9 // 10
    return codes[:cut], codes[cut:]


def batches(codes: Tensor, seed: int = 0) -> Iterator[Tensor]:
    """Random windows of the text for ever, [BATCH, CONTEXT + 1]."""
    random = torch.Generator().manual_seed(seed)
    windows = codes.unfold(0, CONTEXT + 1, 1)
    while True:
        yield windows[torch.randint(len(windows), (BATCH,), generator=random)]


def loss(net: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats of every character, given those before it in its window [batch, length + 1]."""
    logits = net(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def rate(step: int, steps: int, peak: float) -> float:
    """The learning rate of `step`: up to `peak` in a straight line, then down to a tenth of it along a cosine."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(steps - WARMUP, 1)))


def train(
    net: nn.Module, data: Iterator[Tensor], steps: int, *, peak: float = PEAK_RATE, bf16: bool = False
) -> Iterator[tuple[int, float]]:
    """Train `net`, a batch of `data` a step; how many steps are done, and the loss of the last."""
    matrices = [p for p in net.parameters() if p.dim() > 1]
    gains = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=BETAS, fused=True)
    device = next(net.parameters()).device
    net.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, peak)
        with precision(device, bf16):
            found = loss(net, next(data).to(device))
        optimizer.zero_grad()
        found.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        yield step + 1, found.item()


def precision(device: torch.device, bf16: bool) -> AbstractContextManager[object]:
    """Products of matrices in bf16, or everything in f32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


@torch.no_grad()
def evaluate(net: nn.Module, codes: Tensor) -> float:
    """The mean loss over the windows that `codes` falls into, one after the other."""
    net.eval()
    windows = codes.unfold(0, CONTEXT + 1, CONTEXT)
    device = next(net.parameters()).device
    losses = [loss(net, part.to(device)).item() * len(part) for part in windows.split(64)]
    return sum(losses) / len(windows)


@torch.no_grad()
def sample(net: nn.Module, prompt: str, count: int, *, temperature: float = 0.7, seed: int = 0) -> str:
    """`prompt` and `count` characters that the model goes on with, one call each, from what its cache keeps."""
    net.eval()
    device = next(net.parameters()).device
    random = torch.Generator(device).manual_seed(seed)
    codes = torch.tensor([list(prompt.encode("ascii"))], device=device)
    cache = net.new_cache(1, len(prompt) + count)
    new = codes
    for _ in range(count):
        logits = net(new, cache=cache)[:, -1].float()
        new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
        codes = torch.cat((codes, new), 1)
    return bytes(codes[0].tolist()).decode("ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT, help="an ASCII text")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="products of matrices in bf16")
    parser.add_argument("--checkpointing", action="store_true", help="less memory: activations are computed again")
    given = parser.parse_args()

    net = weft.torch(model, device=given.device)
    net.checkpointing = given.checkpointing
    codes, held_out = read(given.text)
    start = time.perf_counter()
    for step, found in train(net, batches(codes), given.steps, bf16=given.bf16):
        if step % 50 == 0 or step == given.steps:
            print(f"step {step:5}  loss {found:.3f}  {time.perf_counter() - start:5.0f} s", flush=True)
    print(f"loss on held-out text {evaluate(net, held_out):.3f}\n")
    for seed in range(3):  # no longer than what it was trained on: positions beyond are new to it
        print(sample(net, "And David said", CONTEXT - 14, seed=seed), end="\n---\n")


if __name__ == "__main__":
    main()
