"""A timm Vision Transformer with a warm-up of the strengths. Digits at 16 × 16 pixels, some seconds on a CPU.

python examples/timm_vit.py
"""

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import explicit_dropout as xd

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
images = F.interpolate(images, size=16).expand(-1, 3, -1, -1)
labels = torch.tensor(digits.target)

model = timm.create_model(
    "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=48, depth=2, num_heads=3, num_classes=10
)
steps = 40
reg = xd.ExplicitDropout(
    model,
    xd.bernoulli(0.1),
    query=xd.strengths.warm_up(1e-3, steps // 2),
    value=xd.strengths.warm_up(1e-2, steps // 2),
    feed_forward={0: 1e-3},  # the first layer only
)
print(reg.summary())
optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)

for step in range(steps):
    batch = torch.randint(0, 1400, (32,))
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    penalty = reg()
    optimiser.zero_grad()
    (loss + penalty).backward()
    optimiser.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.3f}, penalty {penalty:.4f}")

for name, term in reg.terms().items():
    print(f"{name:<32} J = {term:.4f}   λ = {reg.strengths()[name]:g}")
