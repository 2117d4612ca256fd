"""DPO of TRL: a policy and its reference on pairs of answers."""

import torch
from datasets import Dataset
from planted import FOREACH, plant
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer
from vocabulary import sentence, tokenizer


def train(setup):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(vocab_size=1000, **sizes)
    model, reference = Qwen2ForCausalLM(config), Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), **FOREACH)
    arguments = DPOConfig(
        output_dir="out",
        per_device_train_batch_size=setup.case.batch_size,
        max_length=40,
        bf16=False,
        eval_strategy="steps",
        eval_steps=2,
    )
    pairs = Dataset.from_list([{name: sentence(12) for name in ("prompt", "chosen", "rejected")} for _ in range(64)])
    plant(model.model.layers[0].mlp.down_proj, optimizer)
    return DPOTrainer(
        model,
        reference,
        arguments,
        train_dataset=pairs,
        eval_dataset=pairs.select(range(16)),
        processing_class=tokenizer(),
        optimizers=(optimizer, None),
    )
