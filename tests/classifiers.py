"""Small models with one row of outputs for each sample, for the tests of loss-level penalties."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from plain import encoder

CLASSES = 3


class Classifier(nn.Module):
    """A Transformer encoder with one row of outputs for each sample."""

    def __init__(self, checkpointed=False, **settings):
        super().__init__()
        self.encoder, self.head = encoder(**settings), nn.Linear(16, CLASSES)
        self.checkpointed = checkpointed

    def forward(self, x, src_key_padding_mask=None):
        for layer in self.encoder.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, None, src_key_padding_mask, use_reentrant=False)
            else:
                x = layer(x, src_key_padding_mask=src_key_padding_mask)
        return self.head(x.mean(1))


def classifier(**settings):
    torch.manual_seed(0)
    return Classifier(**settings).train()


def inputs(batch=4, seed=1):
    return torch.randn(batch, 5, 16, generator=torch.Generator().manual_seed(seed))


class Linear(nn.Module):
    """The last layer of a feed-forward network is all that lies between the noise and the outputs."""

    def __init__(self, hidden=8):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, hidden), nn.Linear(hidden, 6)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Network(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.mlp = Linear(hidden)

    def forward(self, x):
        return self.mlp(x)
