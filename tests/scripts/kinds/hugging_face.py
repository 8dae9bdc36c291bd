"""transformers' Trainer on a model made from a configuration."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16))
rows = [{"input_ids": (ids := torch.randint(0, 64, (16,))), "labels": ids} for _ in range(16)]
arguments = TrainingArguments(
    "checkpoints", max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", logging_strategy="no",
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.remove_callback(PrinterCallback)  # prints times
result = trainer.train()
print(repr(result.training_loss))
print(repr(sum(parameter.sum().item() for parameter in model.parameters())))
