"""Training of vision-language models: LLaVA-1.6 and Qwen2-VL, the eight rows that paddlemix published for eight H800.

Batch 16 a GPU, bf16 weights, ZeRO stage 2, activation checkpointing of the language model; the vision tower is frozen
throughout. The pre-training of LLaVA trains its projector alone. Beside each row of the table the same work on one GPU.
"""

import pytest

from pytest_gputrain import Case, grid

VISION_LANGUAGE = Case(precision="bf16", batch_size=16, activation_checkpointing=True)
LLAVA = VISION_LANGUAGE.replace(sequence_length=2048, resolution="336x336")
QWEN2_VL = VISION_LANGUAGE.replace(sequence_length=512, resolution="504x364")

CASES = [
    *grid(
        LLAVA.replace(parallel="zero2", gpus=8),
        model=["llava-1.6-7b", "llava-1.6-13b"],
        method=["pretrain", "sft", "lora"],
        platforms=["h800"],
    ),
    *grid(
        QWEN2_VL.replace(parallel="zero2", gpus=8),
        model=["qwen2-vl-2b", "qwen2-vl-7b"],
        method=["sft"],
        platforms=["h800"],
    ),
    *grid(
        LLAVA,
        model=["llava-1.6-7b", "llava-1.6-13b"],
        method=["pretrain", "sft", "lora"],
        platforms=["h100", "h200", "a100"],
    ),
    *grid(
        QWEN2_VL,
        model=["qwen2-vl-2b", "qwen2-vl-7b"],
        method=["sft"],
        platforms=["h100", "h200", "a100"],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vision_language(gputrain, case):
    gputrain.check(case)
