"""LoRA of CogVideoX's transformer on encoded videos and prompts, as cogvideox-factory trains it."""

import argparse

import torch
from accelerate import Accelerator
from diffusers import CogVideoXDDIMScheduler, CogVideoXTransformer3DModel
from peaks import print_peaks
from peft import LoraConfig

UPDATES = 3
SIZES = {
    "2b": {"num_attention_heads": 30, "num_layers": 30},
    "5b": {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
}
FRAMES, HEIGHT, WIDTH = 13, 60, 90
"""Of the latents of a video of 49 x 480 x 720."""


def rotations():
    """Return the cosines and sines of the positions of all patches."""
    shape = (FRAMES * HEIGHT // 2 * WIDTH // 2, 64)
    return torch.ones(shape).cuda(), torch.zeros(shape).cuda()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("rank", type=int)
    parser.add_argument("batch", type=int)
    parser.add_argument("--checkpointing", action="store_true")
    asked = parser.parse_args()

    accelerator = Accelerator(mixed_precision="bf16")
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel(**SIZES[asked.size])
    model = model.to(torch.bfloat16).to_empty(device="cuda").requires_grad_(False)
    if asked.checkpointing:
        model.enable_gradient_checkpointing()
    places = ["to_k", "to_q", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=asked.rank, lora_alpha=asked.rank, target_modules=places))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-4))
    scheduler = CogVideoXDDIMScheduler(prediction_type="v_prediction")
    model.train()
    for _ in range(UPDATES):
        latents = torch.randn(asked.batch, FRAMES, 16, HEIGHT, WIDTH).to("cuda", torch.bfloat16)
        prompts = torch.randn(asked.batch, 226, 4096).to("cuda", torch.bfloat16)
        times = torch.randint(1000, (asked.batch,)).cuda()
        noisy = scheduler.add_noise(latents, torch.randn_like(latents), times)
        output = model(
            hidden_states=noisy,
            encoder_hidden_states=prompts,
            timestep=times,
            image_rotary_emb=rotations() if asked.size == "5b" else None,
            return_dict=False,
        )[0]
        predicted = scheduler.get_velocity(output, noisy, times)
        loss = (predicted - latents).pow(2).flatten(1).mean(1).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print_peaks(model)


if __name__ == "__main__":
    main()
