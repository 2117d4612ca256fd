"""Training steps of models and losses of OpenCLIP, with random weights."""

import open_clip
import pytest
import torch
from open_clip import loss as losses

MODELS = ["ViT-B-32", "ViT-L-14", "RN50", "coca_ViT-B-32", "ViT-B-16-SigLIP"]


def train(setup, name):
    model = open_clip.create_model(name, output_dict=True).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters())
    vision, text = model.visual.image_size, getattr(model, "context_length", None) or model.text.context_length
    size = vision[0] if isinstance(vision, tuple) else vision
    if "coca" in name:
        loss_of = losses.CoCaLoss(caption_loss_weight=2.0, clip_loss_weight=1.0)
    else:
        loss_of = losses.SigLipLoss() if "SigLIP" in name else losses.ClipLoss()
    images = torch.randn(2, 3, size, size, device=setup.device)
    texts = torch.randint(1, 1000, (2, text), device=setup.device)
    while True:
        outputs = model(images, texts)
        if "logits" in outputs:
            outputs.setdefault("labels", texts[:, -outputs["logits"].shape[1] :])
        loss = sum(loss_of(**outputs, output_dict=True).values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("name", MODELS)
def test_models(gputrain, name):
    gputrain.check(train, precision="fp32", batch_size=2, args={"name": name})
