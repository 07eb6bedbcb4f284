"""FSDP2: attach first, then shard. Weights are whole only while a layer runs; the penalty is exact all the same.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import explicit_dropout as xd

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if cuda else torch.device("cpu")

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).to(device)
reg = xd.ExplicitDropout(model, xd.inverted(0.1), feed_forward=1e-3)
mesh = init_device_mesh(device.type, (world,))
for block in model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(1)
for step in range(10):
    x = torch.randn(4 * world, 12, 32)[rank::world].to(device)
    loss = (model(x) - x.flip(1)).square().mean()
    penalty = reg()
    optimiser.zero_grad()
    (loss + penalty).backward()
    optimiser.step()
    if rank == 0 and step % 3 == 0:
        print(f"step {step}: loss {loss:.3f}, penalty {penalty:.4f}")
if rank == 0:
    print(f"{world} processes hold {world} shards of the weights")
dist.barrier()
dist.destroy_process_group()
