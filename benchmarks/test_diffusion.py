"""Training of video diffusion models: three of the five of amd-diffusion.

On eight MI300X: fully sharded, bf16 arithmetic over fp32 weights, fused AdamW, videos, texts and images encoded beforehand.
Beside them the same models on one GPU, by every method they have.
"""

import pytest

from pytest_gputrain import Case, grid

AMD = Case(precision="bf16-amp", optimizer="adamw-fused", learning_rate=1e-5)
VIDEO = AMD.replace(resolution="960x544", frames=9, batch_size=1)
WAN = AMD.replace(model="wan2.1-i2v", resolution="768x512", frames=129, batch_size=3, activation_checkpointing=True)

MI300X_X8 = {"parallel": "fsdp", "gpus": 8, "platforms": ("mi300x",)}
ONE_GPU = ("h100", "h200", "a100", "mi300x")
BF16 = {"precision": "bf16", "learning_rate": 1e-4, "platforms": ONE_GPU, "activation_checkpointing": True, "batch_size": 1}

CASES = [
    *[model.replace(**MI300X_X8) for model in (VIDEO.replace(model="mochi-1"), VIDEO.replace(model="hunyuan-video"), WAN)],
    # On one GPU.
    *grid(VIDEO.replace(**BF16), model=["mochi-1", "hunyuan-video"], method=["full", "lora"]),
    *grid(WAN.replace(**BF16), method=["full", "lora"]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_diffusion(gputrain, case):
    gputrain.check(case)
