"""Updates of a vision transformer and a language model together under autocast, as nanoVLM's table of VRAM has them.

The vision transformer is SigLIP 2's of 256 x 256 pixels, the language model SmolLM2 of 135M, and each sample has 128
tokens, 64 of which are of the image. Weights are in fp32, and torch.optim.AdamW updates them.
"""

import sys

import torch
from peaks import print_peaks
from torch import nn
from torch.nn import functional as F

VISION, PATCH, SIDE, VISION_HEADS, VISION_LAYERS = 768, 16, 16, 12, 12
WIDTH, INNER, HEADS, GROUPS, LAYERS, VOCABULARY = 576, 1536, 9, 3, 30, 49153
TOKENS, IMAGE_TOKENS, SHUFFLED = 128, 64, 2
"""The tokens of a sample, those of its image, and the side of a square of patches that becomes one token."""
HEAD = WIDTH // HEADS


class VisionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(VISION, eps=1e-6), nn.LayerNorm(VISION, eps=1e-6)
        self.together, self.out = nn.Linear(VISION, 3 * VISION), nn.Linear(VISION, VISION)
        self.up, self.down = nn.Linear(VISION, 4 * VISION), nn.Linear(4 * VISION, VISION)

    def forward(self, hidden):
        parts = self.together(self.first(hidden)).split(VISION, dim=2)
        query, key, value = (part.unflatten(2, (VISION_HEADS, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).contiguous().flatten(2)
        hidden = hidden + self.out(attended)
        return hidden + self.down(F.gelu(self.up(self.second(hidden)), approximate="tanh"))


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, VISION, PATCH, PATCH)
        self.places = nn.Parameter(torch.zeros(1, SIDE**2, VISION))
        self.layers = nn.ModuleList(VisionLayer() for _ in range(VISION_LAYERS))
        self.norm = nn.LayerNorm(VISION, eps=1e-6)

    def forward(self, images):
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden):
        inverse = torch.rsqrt(torch.mean(hidden**2, dim=-1, keepdim=True) + 1e-5)
        return hidden * inverse * self.weight


def turned(states, cosines, sines):
    first, second = states.chunk(2, dim=-1)
    return states * cosines + torch.cat((-second, first), dim=-1) * sines


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = nn.Linear(WIDTH, GROUPS * HEAD, bias=False), nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first, self.second = RMSNorm(), RMSNorm()

    def forward(self, hidden, cosines, sines, mask):
        normed = self.first(hidden)
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(normed).unflatten(2, (-1, HEAD)).transpose(1, 2) for layer in layers)
        query, key = turned(query, cosines, sines), turned(key, cosines, sines)
        cached = key, value  # The cache for generation is made in training too, and kept to the end of the forward pass.
        key, value = (states.repeat_interleave(HEADS // GROUPS, dim=1) for states in cached)
        added = (1.0 - mask[:, None, None].float()) * torch.finfo(query.dtype).min
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=added, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).contiguous().flatten(2))
        normed = self.second(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed)), cached


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("rates", 1.0 / 100000 ** (torch.arange(0, HEAD, 2).float() / HEAD))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, hidden, mask):
        places = torch.arange(TOKENS, device=hidden.device).expand(len(hidden), -1)
        with torch.no_grad():
            angles = places.reshape(-1).float()[:, None] * self.rates
            angles = torch.cat((angles, angles), dim=-1).unflatten(0, (len(hidden), TOKENS))
            cosines, sines = (function(angles)[:, None] for function in (torch.cos, torch.sin))
        caches = []
        for layer in self.layers:
            hidden, cached = layer(hidden, cosines, sines, mask)
            caches.append(cached)
        return self.norm(hidden)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision, self.language = Vision(), Language()
        self.between = nn.Linear(VISION * SHUFFLED**2, WIDTH, bias=False)

    def forward(self, tokens, images, mask, labels):
        seen = self.vision(images).unflatten(1, (SIDE // SHUFFLED, SHUFFLED, SIDE // SHUFFLED, SHUFFLED))
        seen = self.between(seen.permute(0, 1, 3, 2, 4, 5).contiguous().flatten(3).flatten(1, 2))
        hidden = self.language.embedding(tokens).clone()
        samples = torch.arange(len(tokens), device=tokens.device)[:, None].expand(-1, IMAGE_TOKENS)
        places = torch.zeros_like(samples[:, :1]) + torch.arange(IMAGE_TOKENS, device=tokens.device)
        hidden[samples, places] = seen.to(hidden.dtype)
        logits = self.language.head(self.language(hidden, mask))
        return logits, F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-100)


def main(batch):
    model = Model().to("cuda").train()
    print("allocated by weights", torch.cuda.memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(2):
        images = torch.zeros(batch, 3, SIDE * PATCH, SIDE * PATCH).to("cuda")
        tokens = torch.randint(0, VOCABULARY, (batch, TOKENS)).to("cuda")
        labels, mask = tokens.clone(), torch.ones_like(tokens)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            _, loss = model(tokens, images, mask, labels)
        loss.backward()
        optimizer.step()
    print_peaks(model)


if __name__ == "__main__":
    main(int(sys.argv[1]))
