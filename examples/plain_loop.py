"""A plain PyTorch loop: two lines attach the penalty, one adds it to the loss. Digits, a few seconds on a CPU.

python examples/plain_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import explicit_dropout as xd

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16  # 1797 × 8 × 8; every row of pixels is a token
labels = torch.tensor(digits.target)
train, test = torch.arange(1400), torch.arange(1400, 1797)


class RowEncoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.1 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x) + self.position).mean(1))


model = RowEncoder()
reg = xd.ExplicitDropout(model, xd.inverted(0.1), value=1e-2, feed_forward=1e-3)
print(reg.summary())
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)

for epoch in range(3):
    for batch in train[torch.randperm(len(train))].split(50):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        penalty = reg()
        optimiser.zero_grad()
        (loss + penalty).backward()
        optimiser.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(-1) == labels[test]).float().mean()
    model.train()
    print(f"epoch {epoch}: loss {loss:.3f}, penalty {penalty:.4f}, test accuracy {accuracy:.1%}")
