"""Data-parallel training of ResNet-50, VGG-16, BERT-large and Transformer-big on 1, 2, 4 and 8 GPUs.

The cases of eight are the collective systems of paddle-distributed, published as pictures, without figures, for eight V100
of 32 GB. Conditions are those of its scripts, in fp32; what they leave open was chosen (docs/distributed-suites.md). The
batch of a GPU is the same on any number of them: the cases of one are what the scaling efficiency of the others is measured
by.
"""

import pytest

from pytest_gputrain import Case, grid

FP32 = Case(precision="fp32")
IMAGES = FP32.replace(resolution="224x224", optimizer="momentum", learning_rate=0.01)
BERT = FP32.replace(model="bert-large", sequence_length=512, batch_size=4, optimizer="adam", learning_rate=1e-4)
TRANSFORMER = FP32.replace(model="transformer-big", sequence_length=64, batch_size=64, optimizer="adam", learning_rate=1e-4)
ON_SEVERAL = {
    "parallel": "ddp",
    "platforms": ("v100", "v100_32gb", "a100", "a800", "h100", "h800", "h200", "b200", "mi300x"),
}
ON_EIGHT = {**ON_SEVERAL, "gpus": 8}

CASES = [
    *grid(IMAGES.replace(**ON_EIGHT), model=["resnet-50", "vgg-16"], batch_size=[32, 64, 128]),
    BERT.replace(**ON_EIGHT),
    TRANSFORMER.replace(**ON_EIGHT),
    # On two and four.
    *grid(IMAGES.replace(**ON_SEVERAL), model=["resnet-50", "vgg-16"], batch_size=[32], gpus=[2, 4]),
    *grid(BERT.replace(**ON_SEVERAL), gpus=[2, 4]),
    *grid(TRANSFORMER.replace(**ON_SEVERAL), gpus=[2, 4]),
    # On one.
    *grid(IMAGES, model=["resnet-50", "vgg-16"], batch_size=[32, 64, 128]),
    BERT,
    TRANSFORMER,
    # With batches from a DataLoader instead of one that stays on the GPU.
    *grid(IMAGES, model=["resnet-50"], batch_size=[128], loader_workers=[8]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_collective(gputrain, case):
    gputrain.check(case, scaling=True)
