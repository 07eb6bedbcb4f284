"""The Hugging Face Trainer with gradient accumulation: a small OPT learns to count. Seconds on a CPU.

python examples/hf_trainer.py
"""

import tempfile

import torch
from transformers import OPTConfig, OPTForCausalLM, TrainingArguments, set_seed

import explicit_dropout as xd
from explicit_dropout.integrations.huggingface import ExplicitDropoutTrainer

set_seed(0)
sequences = (torch.arange(16)[None] + torch.randint(0, 20, (128, 1))) % 20  # 3 4 5 6 …, modulo 20
data = [{"input_ids": sequence, "labels": sequence} for sequence in sequences]

config = OPTConfig(
    vocab_size=20, max_position_embeddings=16, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2,
    num_attention_heads=4, pad_token_id=0, bos_token_id=0, eos_token_id=0, use_cache=False,
)  # fmt: skip
model = OPTForCausalLM(config)
reg = xd.ExplicitDropout(model, xd.inverted(0.1), value=1e-2, attended_value=1e-2, feed_forward=1e-3)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=20,
        learning_rate=5e-3,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = ExplicitDropoutTrainer(model, arguments, train_dataset=data, regulariser=reg)
    trainer.train()

for entry in trainer.state.log_history:
    if "loss" in entry:
        terms = ", ".join(f"{key} {float(value):.4f}" for key, value in entry.items() if key.startswith("penalty"))
        print(f"step {entry['step']}: loss {float(entry['loss']):.3f}, {terms}")
