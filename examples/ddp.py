"""Distributed data parallel: each process adds the penalty of its own batch, and DDP averages the gradients.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import explicit_dropout as xd

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if cuda else torch.device("cpu")

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).to(device)
reg = xd.ExplicitDropout(model, xd.inverted(0.1), query=1e-3, value=1e-2, feed_forward=1e-3)  # before wrapping
wrapped = DistributedDataParallel(model)
optimiser = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)

torch.manual_seed(1)
for step in range(10):
    x = torch.randn(4 * world, 12, 32)[rank::world].to(device)  # this process's share of the batch
    loss = (wrapped(x) - x.flip(1)).square().mean()
    penalty = reg()
    optimiser.zero_grad()
    (loss + penalty).backward()
    optimiser.step()
    if rank == 0 and step % 3 == 0:
        print(f"step {step}: loss {loss:.3f}, penalty {penalty:.4f}")

checksum = sum(p.double().sum() for p in model.parameters()).detach()
sums = [torch.zeros_like(checksum) for _ in range(world)]
dist.all_gather(sums, checksum)
if not all(torch.equal(checksum, other) for other in sums):
    raise SystemExit("processes have drifted apart")
if rank == 0:
    print(f"{world} processes hold the same weights")
dist.barrier()
dist.destroy_process_group()
