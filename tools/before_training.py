"""Measures what trainers do before training that a bare model does not: the GiB that each costs for Llama 3.1 8B.

    gputrain emulate --gpu h100 -- python tools/before_training.py

docs/predict.md has the table. It runs on a GPU of 80 GB, too, and needs transformers, peft and bitsandbytes. Each
row is a line of tab-separated fields: what is changed, and the peaks of allocated and reserved bytes in two steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from typing import Any

import bitsandbytes as bnb
import peft
import torch
import transformers
from torch import nn

LENGTH = 2048


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is done before training. The defaults are those of a bare loop."""

    quantized: bool = False
    prepared: bool = False
    """Whether peft's ``prepare_model_for_kbit_training`` is called."""
    autocast: bool = False
    autocast_adapter_dtype: bool = True
    bf16_adapters: bool = False
    """Whether adapters are converted to bf16, as TRL does for QLoRA."""
    checkpointing: bool = True
    reentrant: bool = False
    input_require_grads: bool = False
    use_cache: bool = False
    length: int = LENGTH
    batch: int = 2
    padded: bool = False
    """Whether every second sample has half the length, and a mask."""
    packed: bool = False
    """Whether every row has two samples that do not attend to each other."""


LORA = Setup()
PLAIN = Setup(checkpointing=False)
QLORA = Setup(quantized=True)
AMP = Setup(autocast=True)
QLORA_AMP = Setup(quantized=True, autocast=True)
ROWS = {
    "LoRA": LORA,
    "LoRA, enable_input_require_grads": dataclasses.replace(LORA, input_require_grads=True),
    "LoRA, reentrant": dataclasses.replace(LORA, reentrant=True, input_require_grads=True),
    "LoRA, autocast_adapter_dtype=False": dataclasses.replace(LORA, autocast_adapter_dtype=False),
    "LoRA, 1,985 tokens": dataclasses.replace(LORA, length=1985),
    "LoRA, padded": dataclasses.replace(LORA, padded=True),
    "LoRA, packed": dataclasses.replace(LORA, packed=True),
    "LoRA, one row of 4,096 tokens": dataclasses.replace(LORA, length=2 * LENGTH, batch=1),
    "LoRA, one row of 4,096 tokens, packed": dataclasses.replace(LORA, length=2 * LENGTH, batch=1, packed=True),
    "LoRA, no checkpointing": PLAIN,
    "LoRA, no checkpointing, enable_input_require_grads": dataclasses.replace(PLAIN, input_require_grads=True),
    "LoRA, no checkpointing, autocast_adapter_dtype=False": dataclasses.replace(PLAIN, autocast_adapter_dtype=False),
    "LoRA, no checkpointing, use_cache": dataclasses.replace(PLAIN, use_cache=True),
    "LoRA, autocast": AMP,
    "LoRA, autocast, autocast_adapter_dtype=False": dataclasses.replace(AMP, autocast_adapter_dtype=False),
    "LoRA, autocast, no checkpointing": dataclasses.replace(AMP, checkpointing=False),
    "QLoRA": QLORA,
    "QLoRA, prepare_model_for_kbit_training": dataclasses.replace(QLORA, prepared=True),
    "QLoRA, autocast": QLORA_AMP,
    "QLoRA, autocast, prepare_model_for_kbit_training": dataclasses.replace(QLORA_AMP, prepared=True),
    "QLoRA, autocast, adapters in bf16": dataclasses.replace(QLORA_AMP, bf16_adapters=True),
}


def main(names: list[str]) -> None:
    """Print the rows of these names, all by default."""
    for name in names or ROWS:
        allocated, reserved = peaks(ROWS[name])
        print(name, f"{allocated / 2**30:.3f}", f"{reserved / 2**30:.3f}", sep="\t", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def peaks(setup: Setup) -> tuple[int, int]:
    """Train two steps, and return the peaks of allocated and reserved bytes."""
    model = prepared(setup)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
    inputs = batch(setup)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16) if setup.autocast else contextlib.nullcontext():
            outputs = model(**inputs, use_cache=setup.use_cache)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del outputs
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def prepared(setup: Setup) -> Any:
    """Make the model with its adapters."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if setup.quantized:
        quantise(model)
    if setup.prepared:
        peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=targets)
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=setup.autocast_adapter_dtype)
    # Not before: peft requires gradients of the inputs itself where a model of 16 bits has checkpointing already.
    if setup.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": setup.reentrant})
    if setup.input_require_grads:
        model.enable_input_require_grads()
    if setup.bf16_adapters:
        for value in model.parameters():
            if value.requires_grad:
                value.data = value.data.bfloat16()
    return model.train()


def quantise(model: Any) -> None:
    """Pack all linear layers but the head as NF4, as transformers does while it loads a model in 4 bits."""
    for parent in list(model.model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                packed = bnb.nn.Linear4bit(
                    layer.in_features,
                    layer.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                    device="meta",
                )
                packed.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=packed)
                setattr(parent, name, packed.cuda())
    model.is_loaded_in_4bit = True


def batch(setup: Setup) -> dict[str, torch.Tensor]:
    """Draw the samples."""
    ids = torch.randint(0, 128256, (setup.batch, setup.length), device="cuda")
    inputs = {"input_ids": ids, "labels": ids}
    if setup.padded:
        mask = torch.ones_like(ids)
        mask[1::2, setup.length // 2 :] = 0
        inputs["attention_mask"] = mask
    if setup.packed:
        inputs["position_ids"] = (torch.arange(setup.length, device="cuda") % (setup.length // 2)).expand_as(ids)
    return inputs


if __name__ == "__main__":
    main(sys.argv[1:])
