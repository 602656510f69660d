"""The training of train_characters.py on several processes, among which FSDP2 cuts the weights of every block.

torchrun --nproc-per-node 2 examples/train_fsdp.py
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_characters import STEPS, TEXT, batches, evaluate, model, read, sample, train

import weft


def shard(net: nn.Module, mesh: DeviceMesh, bf16: bool) -> nn.Module:
    """`net` with each process holding its part of every weight; a block's weights are whole only while it runs."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    return net


def own_rows(data: Iterator[Tensor], mesh: DeviceMesh) -> Iterator[Tensor]:
    """Of every batch the rows of this process: all processes draw the same batches."""
    for windows in data:
        yield windows.chunk(mesh.size())[mesh.get_local_rank()]


def mean(value: float, mesh: DeviceMesh) -> float:
    """The mean of `value` over the processes."""
    total = torch.tensor(value, device=mesh.device_type)
    dist.all_reduce(total)
    return total.item() / mesh.size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=50, help="steps from one printed loss to the next")
    parser.add_argument("--device", default="cpu", help="cpu (gloo) or cuda (NCCL)")
    parser.add_argument(
        "--bf16", action="store_true", help="weights and products in bf16, their sums and updates in f32"
    )
    parser.add_argument("--checkpointing", action="store_true", help="less memory: activations are computed again")
    given = parser.parse_args()

    dist.init_process_group()  # torchrun tells how many processes there are, and which this is
    mesh = init_device_mesh(given.device, (dist.get_world_size(),))
    if given.device == "cuda":
        torch.cuda.set_device(mesh.get_local_rank())
    net = weft.torch(model, device=given.device)  # the same on every process
    net.checkpointing = given.checkpointing
    net = shard(net, mesh, given.bf16)

    first = dist.get_rank() == 0
    codes, held_out = read(TEXT)
    for step, found in train(net, own_rows(batches(codes), mesh), given.steps):
        if step % given.every == 0 or step == given.steps:
            found = mean(found, mesh)
            if first:
                print(f"step {step:5}  loss {found:.4f}", flush=True)
    found = evaluate(net, held_out[:4096])
    graph = weft.with_weights(model.graph(), net.state_dict())  # gathered: every process has it whole
    if first:
        print(f"loss on held-out text {found:.4f}\n")
        print(sample(weft.torch(graph), "And David said", 100))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # an ordinary exit may abort: caches of DTensor keep the threads of gloo (PyTorch 2.13)
