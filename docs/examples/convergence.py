"""Tests whether a checkpoint of FLUX.1 still converges on data of your own in bf16 or fp16, by its loss curves.

Copy this file to benchmarks/test_convergence.py. CHECKPOINT is a folder that ``save_pretrained`` wrote, for FLUX.1-dev the
folder ``transformer``. SAMPLES is a folder with a file for each sample: ``torch.save({"latents": ..., "text": ...,
"pooled": ...}, file)``. ``img_ids`` are zeros here; use the rows and columns of your latents instead, as diffusers'
FluxPipeline does in ``_prepare_latent_image_ids``. This trains with two learning rates, as a published study did:

    pytest benchmarks --gpu-platform=h100 --gpu-loss=1500 --gpu-set=learning_rate=1e-6,5e-5 --gpu-set=lr_warmup_steps=150
"""

import os
from pathlib import Path

import pytest

CHECKPOINT, SAMPLES = os.environ.get("CHECKPOINT"), os.environ.get("SAMPLES")


class Samples:
    """One file a sample: latents (tokens, channels), its text (tokens, width), and the text's pooled embedding (width)."""

    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*.pt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        import torch

        return torch.load(self.files[index], weights_only=True)


def endless(loader):
    while True:
        yield from loader


def flux(setup):
    import torch
    from diffusers import FluxTransformer2DModel
    from diffusers.optimization import get_scheduler

    case, device = setup.case, setup.device
    torch.manual_seed(0)  # every precision sees the same samples, noise and times
    model = FluxTransformer2DModel.from_pretrained(CHECKPOINT, torch_dtype=setup.dtype).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate)
    updates = {"num_warmup_steps": case.lr_warmup_steps, "num_training_steps": case.warmup + case.steps}
    schedule = get_scheduler(case.lr_scheduler, optimizer, **updates)
    scaler = torch.amp.GradScaler(device.type, enabled=case.precision == "fp16-amp")
    loader = torch.utils.data.DataLoader(Samples(SAMPLES), case.batch_size, shuffle=True, drop_last=True)
    batches = endless(loader)
    setup.watch(model)

    def step():
        batch = {name: value.to(device, setup.dtype) for name, value in next(batches).items()}
        latents, text, pooled = batch["latents"], batch["text"], batch["pooled"]
        times = torch.randn(len(latents)).sigmoid().to(latents)
        noise = torch.randn(latents.shape).to(latents)
        noisy = torch.lerp(latents, noise, times[:, None, None])
        with setup.casting():
            velocity = model(
                hidden_states=noisy,
                encoder_hidden_states=text,
                pooled_projections=pooled,
                timestep=times,
                guidance=torch.ones_like(times),
                img_ids=torch.zeros(latents.shape[1], 3, device=device),
                txt_ids=torch.zeros(text.shape[1], 3, device=device),
            ).sample
        loss = (velocity.float() - (noise - latents).float()).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm or 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.skipif(not (CHECKPOINT and SAMPLES), reason="set CHECKPOINT and SAMPLES to folders of your own")
def test_convergence(gputrain):
    gputrain.check(flux, precision="bf16-amp", batch_size=4, lr_scheduler="cosine", lr_warmup_steps=2)
