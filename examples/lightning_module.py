"""Lightning: the callback adds the penalty to whatever `training_step` returns. Digits, seconds on a CPU.

python examples/lightning_module.py
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import explicit_dropout as xd
from explicit_dropout.integrations.lightning import ExplicitDropoutCallback


class Digits(lightning.LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, batch_first=True)
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 10)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.head(self.encoder(self.embed(images)).mean(1)), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


lightning.seed_everything(0, verbose=False)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16
loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=50, shuffle=True)

module = Digits()
reg = xd.ExplicitDropout(module.encoder, xd.inverted(0.1), value=1e-2, feed_forward=1e-3)  # what training_step calls
trainer = lightning.Trainer(
    max_epochs=2,
    accumulate_grad_batches=2,
    accelerator="cpu",
    callbacks=[ExplicitDropoutCallback(reg)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, loader)
for name, value in trainer.callback_metrics.items():
    print(f"{name}: {float(value):.4f}")
