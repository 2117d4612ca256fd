import pytest
import train


def finetune(setup):
    for model, loss in train.finetune(setup.device, setup.case.batch_size, steps=1000):
        setup.watch(model)
        yield loss


def classify(setup):
    for model, loss in train.classify(setup.device, setup.case.batch_size, steps=1000):
        setup.watch(model)
        yield loss


@pytest.mark.h100
def test_finetune(gputrain):
    gputrain.check(finetune, precision="bf16", batch_size=4)


@pytest.mark.h100
def test_classify(gputrain):
    gputrain.check(classify, precision="bf16", batch_size=4)
