"""GRPO of TRL: it generates texts, rewards them on the host, and trains on them."""

import torch
from datasets import Dataset
from planted import FOREACH, plant
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from vocabulary import sentence, tokenizer


def reward(completions, **_):
    return [float(len(completion)) for completion in completions]


def train(setup):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=1000, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), **FOREACH)
    arguments = GRPOConfig(
        output_dir="out",
        per_device_train_batch_size=setup.case.batch_size,
        num_generations=4,
        max_completion_length=8,
        bf16=False,
        eval_strategy="steps",
        eval_steps=2,
    )
    prompts = Dataset.from_dict({"prompt": [sentence(16) for _ in range(64)]})
    plant(model.model.layers[0].mlp.down_proj, optimizer)
    return GRPOTrainer(
        model,
        reward,
        arguments,
        train_dataset=prompts,
        eval_dataset=prompts.select(range(8)),
        processing_class=tokenizer(),
        optimizers=(optimizer, None),
    )
