"""Data-parallel training of ResNet-50, VGG-16, BERT-large and Transformer-big: the collective systems of paddle-distributed.

Published as pictures, without figures, for eight V100 of 32 GB. Conditions are those of its scripts, in fp32; what they
leave open was chosen (docs/collective.md). Beside each system the same work on one GPU.
"""

import pytest

from pytest_gputrain import Case, grid

FP32 = Case(precision="fp32")
IMAGES = FP32.replace(resolution="224x224", optimizer="momentum", learning_rate=0.01)
BERT = FP32.replace(model="bert-large", sequence_length=512, batch_size=4, optimizer="adam", learning_rate=1e-4)
TRANSFORMER = FP32.replace(model="transformer-big", sequence_length=64, batch_size=64, optimizer="adam", learning_rate=1e-4)
ON_EIGHT = {"parallel": "ddp", "gpus": 8, "platforms": ("v100",)}

CASES = [
    *grid(IMAGES.replace(**ON_EIGHT), model=["resnet-50", "vgg-16"], batch_size=[32, 64, 128]),
    BERT.replace(**ON_EIGHT),
    TRANSFORMER.replace(**ON_EIGHT),
    # On one GPU.
    *grid(IMAGES, model=["resnet-50", "vgg-16"], batch_size=[32, 64, 128]),
    BERT,
    TRANSFORMER,
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_collective(gputrain, case):
    gputrain.check(case)
