"""A tiny GPT-2 with random weights in Hugging Face Trainer, at 0.6 of the operations: `python examples/hf_trainer.py`."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from pliant import recipes
from pliant.integrations.hf import PliantTrainer

torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=6, n_head=2, bos_token_id=0, eos_token_id=0)
)
data = [{"input_ids": text, "labels": text} for text in torch.randint(0, 64, (64, 32))]

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(folder, max_steps=30, per_device_train_batch_size=8, report_to=[], use_cpu=True, logging_steps=10)
    trainer = PliantTrainer(model, args, train_dataset=data, policy=recipes.pliant(macs=0.6))
    trainer.train()
print("chosen:", ", ".join(unit.name for unit in trainer.session.selection.units))
