"""Fine-tuning of language models: batch 2 x 8,192 unpadded tokens, bf16 weights, torch AdamW, activation checkpointing.

The 19 rows of the llm-trainer tables, which were published for each of three GPUs. A step is one micro-batch, as there.
"""

import pytest

from pytest_gputrain import Case, grid

PUBLISHED = ["h100", "a100", "rtx_pro_6000"]
LLM = Case(
    precision="bf16",
    batch_size=2,
    sequence_length=8192,
    activation_checkpointing=True,
    optimizer="adamw",
    platforms=(*PUBLISHED, "h200"),
)
ADAPTERS = LLM.replace(gradient_accumulation=32)
SHARDED = LLM.replace(gradient_accumulation=32, parallel="fsdp", gpus=2, cpu_offload=True)

CASES = [
    *grid(LLM, model=["llama-3.1-8b", "llama-3-8b", "phi-3-mini-128k"], method=["full"]),
    *grid(SHARDED, model=["llama-2-13b", "gemma-2-9b", "gemma-7b"], method=["full"]),
    *grid(
        ADAPTERS,
        model=["llama-3.1-8b", "llama-3-8b", "llama-2-13b", "gemma-2-9b", "gemma-7b", "phi-3-mini-128k"],
        method=["lora", "qlora"],
    ),
    *grid(SHARDED, model=["llama-3.1-70b"], method=["lora"]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_llm_finetuning(gputrain, case):
    gputrain.check(case)
