"""A Trainer of transformers that accumulates gradients over two batches."""

import torch
from planted import FOREACH, plant
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def train(setup):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), **FOREACH)
    rows = torch.randint(512, (128, 64))
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=setup.case.batch_size,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    plant(model.model.layers[0].mlp.down_proj, optimizer, accumulated=2)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model, arguments, train_dataset=samples, eval_dataset=samples[:32], optimizers=(optimizer, None))
