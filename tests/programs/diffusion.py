"""A U-Net of diffusers that learns to take noise from images, with diffusers' average of its weights."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from planted import FOREACH, evaluate, plant


def train(setup):
    sizes = {"block_out_channels": (16, 32), "down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    model = UNet2DModel(
        16, norm_num_groups=4, layers_per_block=1, up_block_types=("AttnUpBlock2D", "UpBlock2D"), **sizes
    ).to(setup.device)
    average = EMAModel(model.parameters(), use_ema_warmup=True)
    noises = DDPMScheduler(100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **FOREACH)
    plant(model.conv_out, optimizer)
    setup.watch(model)

    def loss_of_batch():
        images = torch.randn(setup.case.batch_size, 3, 16, 16).to(setup.device)
        noise, times = torch.randn_like(images), torch.randint(100, (len(images),)).to(setup.device)
        return (model(noises.add_noise(images, noise, times), times).sample - noise).square().mean()

    setup.evaluation(lambda: evaluate(model, loss_of_batch))
    while True:
        loss = loss_of_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        yield loss
