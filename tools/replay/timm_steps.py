"""Training steps of models and optimizers of timm, with random weights."""

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2

MODELS = {
    "vit_tiny_patch16_224": {"img_size": 64},
    "vit_large_patch16_224": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {"img_size": 112},
    "convnext_atto": {},
    "efficientnet_b0": {},
    "eva02_tiny_patch14_224": {"img_size": 70},
}


def train(setup, name, optimizer="adamw"):
    options = MODELS[name]
    model = timm.create_model(name, num_classes=10, **options).to(setup.device)
    update = create_optimizer_v2(model, opt=optimizer, lr=1e-3)
    size = options.get("img_size", 64)
    while True:
        loss = model(torch.randn(4, 3, size, size, device=setup.device)).logsumexp(1).mean()
        loss.backward()
        update.step()
        update.zero_grad()
        yield loss


@pytest.mark.parametrize("name", MODELS)
def test_models(gputrain, name):
    gputrain.check(train, precision="fp32", batch_size=4, args={"name": name})


@pytest.mark.parametrize("optimizer", ["lamb", "nadamw"])
def test_optimizers(gputrain, optimizer):
    args = {"name": "vit_tiny_patch16_224", "optimizer": optimizer}
    gputrain.check(train, precision="fp32", batch_size=4, args=args)
