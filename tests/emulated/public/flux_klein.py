"""Updates of FLUX.2 klein 4B under gradient checkpointing, as PEFT's comparison of methods for image generation trains it.

A step has two images of 512 x 512 pixels and 512 tokens in bf16, AdamW, and clipped gradients. DINOv2, which scores the
images of evaluations, and the embeddings of all prompts lie on the GPU beside it.
"""

import sys

import peft
import torch
from diffusers import Flux2Transformer2DModel
from peaks import print_peaks
from transformers import Dinov2Config, Dinov2Model

BATCH, PIXELS, TOKENS, IMAGES = 2, 32, 512, 14
"""Images of a step, the side of their packed latents, the tokens of a prompt, and the images whose embeddings are kept."""
LAYERS = [
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("linear_in", "linear_out", "to_qkv_mlp_proj"),
]
METHODS = {
    "lora": lambda: peft.LoraConfig(r=32, lora_alpha=32, target_modules=LAYERS),
    "lora64": lambda: peft.LoraConfig(r=64, lora_alpha=64, target_modules=LAYERS),
    "loha": lambda: peft.LoHaConfig(r=32, alpha=32, target_modules=LAYERS),
    "ia3": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=LAYERS),
    "oft": lambda: peft.OFTConfig(oft_block_size=32, use_cayley_neumann=True, target_modules=LAYERS),
}
RATES = {"ia3": {"lr": 1e-3}, "full": {"lr": 5e-5, "weight_decay": 0.01}}


def model(method):
    with torch.device("meta"):
        made = Flux2Transformer2DModel(
            num_layers=5,
            num_single_layers=20,
            num_attention_heads=24,
            joint_attention_dim=7680,
            guidance_embeds=False,
        ).to(torch.bfloat16)
    made.to_empty(device="cpu")
    made.enable_gradient_checkpointing()
    return made if method == "full" else peft.get_peft_model(made, METHODS[method]())


def main(method, steps=3):
    scorer = Dinov2Model(Dinov2Config(image_size=518)).to("cuda").eval()
    made = model(method).train()
    optimizer = torch.optim.AdamW(made.parameters(), **RATES.get(method, {"lr": 1e-4, "weight_decay": 1e-4}))
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    prompts = torch.zeros(IMAGES, TOKENS, 7680, **bf16)
    places_of_prompts = torch.zeros(IMAGES, TOKENS, 4, device="cuda", dtype=torch.int64)
    latents = torch.zeros(IMAGES, 128, PIXELS, PIXELS, **bf16)
    made.to("cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for step in range(steps):
        chosen = torch.tensor([2 * step, 2 * step + 1], device="cuda")
        images, embedded, places = (kind.index_select(0, chosen) for kind in (latents, prompts, places_of_prompts))
        pixels = torch.zeros(BATCH, PIXELS**2, 4, device="cuda", dtype=torch.int64)
        noise = torch.randn_like(images)
        sigmas = torch.full((BATCH, 1, 1, 1), 0.5, dtype=torch.bfloat16).to("cuda")
        noisy = ((1.0 - sigmas) * images + sigmas * noise).flatten(2).transpose(1, 2)
        optimizer.zero_grad(set_to_none=True)
        predicted = made(
            hidden_states=noisy,
            timestep=torch.full((BATCH,), 0.5, device="cuda"),
            encoder_hidden_states=embedded,
            txt_ids=places,
            img_ids=pixels,
            return_dict=False,
        )[0]
        predicted = predicted.transpose(1, 2).reshape(images.shape)
        target = noise - images
        weighting = torch.ones_like(sigmas)
        loss = (weighting.float() * (predicted.float() - target.float()) ** 2).reshape(BATCH, -1).mean(1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        losses[-1].item()
    print_peaks(made)
    del scorer


if __name__ == "__main__":
    main(*sys.argv[1:2])
