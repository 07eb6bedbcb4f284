"""The dropout that a model was built with, without its dice: one line converts it, one adds its twins to the loss.

python examples/own_dropout.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import explicit_dropout as xd

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # 1797 × 1 × 8 × 8
labels = torch.tensor(digits.target)
train, test = torch.arange(1400), torch.arange(1400, 1797)

config = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, num_labels=10, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
)  # fmt: skip
model = ViTForImageClassification(config).train()
twins = xd.convert_dropout(model, 1e-3)
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)

for epoch in range(4):
    for batch in train[torch.randperm(len(train))].split(50):
        loss = nn.functional.cross_entropy(model(images[batch]).logits, labels[batch])
        penalty = twins()
        optimiser.zero_grad()
        (loss + penalty).backward()
        optimiser.step()
    if epoch == 0:
        print(twins.summary())
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).logits.argmax(-1) == labels[test]).float().mean()
    model.train()
    print(f"epoch {epoch}: loss {loss:.3f}, penalty {penalty:.4f}, test accuracy {accuracy:.1%}")
