"""Training of diffusion models: the Stable Diffusion rows of paddlemix and the five models of amd-diffusion.

paddlemix, on eight H800: data parallel, 512x512; Stable Diffusion 1.5 under bf16 autocast with batch 80 (pretrain) and 96
(LoRA) a GPU and recomputation, Stable Diffusion 3 under fp16 autocast with batch 1. amd-diffusion, on
eight MI300X: fully sharded, bf16 arithmetic over fp32 weights, fused AdamW; images, videos and texts are encoded beforehand.
Beside them the same models on one GPU, by every method they have.
"""

import pytest

from pytest_gputrain import Case, grid

SD_1_5 = Case(model="sd-1.5", precision="bf16-amp", resolution="512x512", activation_checkpointing=True)
PRETRAIN, LORA = SD_1_5.replace(method="pretrain", batch_size=80), SD_1_5.replace(method="lora", batch_size=96)
SD_3 = Case(precision="fp16-amp", resolution="512x512")

AMD = Case(precision="bf16-amp", optimizer="adamw-fused", learning_rate=1e-5)
FLUX = AMD.replace(model="flux.1-dev", resolution="512x512")
SDXL = AMD.replace(model="sdxl", resolution="1024x1024", batch_size=20)
VIDEO = AMD.replace(resolution="960x544", frames=9)
WAN = AMD.replace(model="wan2.1-i2v", resolution="768x512", frames=129, batch_size=3, activation_checkpointing=True)

H800_X8 = {"parallel": "ddp", "gpus": 8, "platforms": ("h800", "h100", "h200")}
MI300X_X8 = {"parallel": "fsdp", "gpus": 8}
# Which GPUs a case on eight of them fits follows from what each takes.
NEED_76_GIB, NEED_126_GIB, NEED_157_GIB = ("mi300x", "h200", "h100"), ("mi300x", "h200"), ("mi300x",)

ONE_GPU = ("h100", "h200", "a100", "mi300x")
BF16 = {"precision": "bf16", "learning_rate": 1e-4, "batch_size": 1, "activation_checkpointing": True, "platforms": ONE_GPU}

CASES = [
    *[case.replace(**H800_X8) for case in (PRETRAIN, LORA)],
    *grid(SD_3.replace(**H800_X8), model=["sd3"], method=["dreambooth", "lora"]),
    *grid(FLUX.replace(**MI300X_X8), batch_size=[1], platforms=NEED_76_GIB),
    *grid(FLUX.replace(**MI300X_X8), batch_size=[10], platforms=NEED_126_GIB),
    SDXL.replace(**MI300X_X8, platforms=NEED_157_GIB),
    *grid(VIDEO.replace(**MI300X_X8), model=["mochi-1"], platforms=NEED_76_GIB),
    *grid(VIDEO.replace(**MI300X_X8), model=["hunyuan-video"], platforms=NEED_126_GIB),
    WAN.replace(**MI300X_X8, platforms=NEED_157_GIB),
    # On one GPU.
    *[case.replace(platforms=ONE_GPU) for case in (PRETRAIN, LORA)],
    *grid(SD_3, model=["sd3"], method=["dreambooth", "lora"], platforms=ONE_GPU),
    *grid(FLUX.replace(**BF16), method=["lora"]),
    *grid(FLUX.replace(**BF16), method=["lora"], activation_checkpointing=[0.5]),
    *grid(SDXL.replace(**BF16), method=["full", "lora"]),
    *grid(VIDEO.replace(**BF16), model=["mochi-1", "hunyuan-video"], method=["lora"]),
    *grid(WAN.replace(**BF16), method=["lora"]),
    # Whole denoisers take ten bytes a parameter and more: those of 10 to 13 billion, and Wan's 16.
    *grid(FLUX.replace(**BF16), method=["full"], platforms=["h200", "mi300x"]),
    *grid(VIDEO.replace(**BF16), model=["mochi-1", "hunyuan-video"], method=["full"], platforms=["h200", "mi300x"]),
    *grid(WAN.replace(**BF16), method=["full"], platforms=["mi300x"]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_diffusion(gputrain, case):
    gputrain.check(case)


@pytest.mark.parametrize("full", grid(SDXL.replace(**BF16), method=["full"]), ids=str)
def test_lora_allocates_less_than_full(compared, full):
    lora = compared.measure(full, method="lora")
    assert lora.peak_allocated_bytes < compared.measure(full).peak_allocated_bytes
