"""Training of diffusion models: the Stable Diffusion rows of paddlemix and the image models of amd-diffusion.

paddlemix, on eight H800: data parallel, 512x512; Stable Diffusion 1.5 under bf16 autocast with batch 80 (pretrain) and 96
(LoRA) a GPU and recomputation, Stable Diffusion 3 (DreamBooth) under fp16 autocast with batch 1 and accumulation 4.
amd-diffusion, on eight MI300X: fully sharded, bf16 arithmetic over fp32 weights, fused AdamW, text and images encoded
beforehand. Beside them the same models on one GPU, by every method they have.
"""

import pytest

from pytest_gputrain import Case, grid

STABLE_DIFFUSION = Case(resolution="512x512", gradient_accumulation=1)
SD_1_5 = STABLE_DIFFUSION.replace(model="sd-1.5", precision="bf16-amp", activation_checkpointing=True)
SD_3 = STABLE_DIFFUSION.replace(precision="fp16", batch_size=1, gradient_accumulation=4)

AMD = Case(precision="bf16-amp", optimizer="adamw-fused", learning_rate=1e-5)
FLUX = AMD.replace(model="flux.1-dev", resolution="512x512")
SDXL = AMD.replace(model="sdxl", resolution="1024x1024", batch_size=20)

H800_X8 = {"parallel": "ddp", "gpus": 8, "platforms": ("h800",)}
MI300X_X8 = {"parallel": "fsdp", "gpus": 8, "platforms": ("mi300x",)}
ONE_GPU = ("h100", "h200", "a100", "mi300x")
BF16 = {"precision": "bf16", "learning_rate": 1e-4, "platforms": ONE_GPU, "activation_checkpointing": True, "batch_size": 1}

CASES = [
    SD_1_5.replace(method="pretrain", batch_size=80, **H800_X8),
    SD_1_5.replace(method="lora", batch_size=96, **H800_X8),
    *grid(SD_3.replace(**H800_X8), model=["sd3"], method=["dreambooth", "lora"]),
    *grid(FLUX.replace(**MI300X_X8), batch_size=[1, 10]),
    SDXL.replace(**MI300X_X8),
    # On one GPU.
    SD_1_5.replace(method="pretrain", batch_size=80, platforms=ONE_GPU),
    SD_1_5.replace(method="lora", batch_size=96, platforms=ONE_GPU),
    *grid(SD_3.replace(platforms=ONE_GPU), model=["sd3"], method=["dreambooth", "lora"]),
    *grid(SDXL.replace(**BF16), method=["full", "lora"]),
    *grid(FLUX.replace(**BF16), method=["full", "lora"]),
    *grid(FLUX.replace(**{**BF16, "activation_checkpointing": 0.5}), method=["lora"], activation_checkpointing=[0.5]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_diffusion(gputrain, case):
    gputrain.check(case)
