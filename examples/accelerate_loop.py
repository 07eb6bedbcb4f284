"""Hugging Face accelerate: attach before `prepare`, add before `backward`. A small BERT, seconds on a CPU.

python examples/accelerate_loop.py
accelerate launch examples/accelerate_loop.py        # several GPUs, mixed precision: as you have configured
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import explicit_dropout as xd

torch.manual_seed(0)
tokens = torch.randint(5, 50, (256, 12))
lengths = torch.randint(6, 13, (256, 1))
mask = (torch.arange(12)[None] < lengths).long()  # padding is left out of the penalty
data = [
    {"input_ids": t * m, "attention_mask": m, "labels": (t[:6].sum() % 2)} for t, m in zip(tokens, mask, strict=True)
]

config = BertConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, pad_token_id=0
)
model = BertForSequenceClassification(config)
reg = xd.ExplicitDropout(model, xd.inverted(0.1), query=1e-3, value=1e-2, feed_forward=1e-3)

accelerator = Accelerator(gradient_accumulation_steps=2)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimiser, loader = accelerator.prepare(model, optimiser, DataLoader(data, batch_size=16))

for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            penalty = reg()
            accelerator.backward(loss + penalty)  # divides both by the accumulation steps
            optimiser.step()
            optimiser.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss:.3f}, penalty {penalty:.4f}")
