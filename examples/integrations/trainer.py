# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face Trainer on ring: the program initialises torch.distributed before it does."""

import hashlib
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import torch_ring  # noqa: F401 - makes the backend known

# The one line that changes. On CPUs TrainingArguments(ddp_backend=...) goes to Accelerate, which
# knows no backends but gloo and mpi there. It takes the default group that it finds, though.
dist.init_process_group("ring")

torch.manual_seed(0)
# Sentences that count: each token is the one before it plus one.
starts = torch.randint(32, (512, 1))
sentences = [(start + torch.arange(16)) % 32 for start in starts]
dataset = [{"input_ids": sentence, "labels": sentence} for sentence in sentences]
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=0.01,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=dataset)
    trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
print(
    f"rank {dist.get_rank()} of {dist.get_world_size()} on {dist.get_backend()}: "
    f"loss {float(losses[0]):.4f} to {float(losses[-1]):.4f}, weights {digest}",
    flush=True,
)
dist.destroy_process_group()
