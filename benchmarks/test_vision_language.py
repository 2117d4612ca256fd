"""Training of vision-language models: LLaVA-1.6 and Qwen2-VL, the eight rows that paddlemix published for eight H800.

Batch 16 a GPU, bf16 weights, ZeRO stage 2, activation checkpointing of the language model; the vision tower is frozen
throughout. The pre-training of LLaVA trains its projector alone. Beside each row of the table the same work on one GPU.
"""

import pytest

from pytest_gputrain import Case, grid

VISION_LANGUAGE = Case(precision="bf16", batch_size=16, activation_checkpointing=True)
LLAVA = VISION_LANGUAGE.replace(sequence_length=2048, resolution="336x336")
QWEN2_VL = VISION_LANGUAGE.replace(sequence_length=512, resolution="504x364")

ON_EIGHT = {"parallel": "zero2", "gpus": 8, "platforms": ("h800", "h100", "h200")}
EIGHTY_GB, LARGER = ["h100", "h200", "a100", "mi300x"], ["h200", "mi300x"]

CASES = [
    *grid(LLAVA.replace(**ON_EIGHT), model=["llava-1.6-7b", "llava-1.6-13b"], method=["pretrain", "sft", "lora"]),
    *grid(QWEN2_VL.replace(**ON_EIGHT), model=["qwen2-vl-2b", "qwen2-vl-7b"], method=["sft"]),
    # On one GPU: training a whole language model takes ten bytes a parameter and more.
    *grid(LLAVA, model=["llava-1.6-7b", "llava-1.6-13b"], method=["pretrain", "lora"], platforms=EIGHTY_GB),
    *grid(LLAVA, model=["llava-1.6-7b"], method=["sft"], platforms=LARGER),
    *grid(LLAVA, model=["llava-1.6-13b"], method=["sft"], platforms=["mi300x"]),
    *grid(QWEN2_VL, model=["qwen2-vl-2b"], method=["sft"], platforms=EIGHTY_GB),
    *grid(QWEN2_VL, model=["qwen2-vl-7b"], method=["sft"], platforms=LARGER),
    # Texts of several lengths, padded to the longest as in the published runs: the tokens per second show what that costs.
    *grid(LLAVA, model=["llava-1.6-7b"], method=["lora"], lengths=["padded"], platforms=EIGHTY_GB),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vision_language(gputrain, case):
    gputrain.check(case)
