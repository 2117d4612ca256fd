"""One update of Qwen3.5's language model on random tokens, whose peak of allocated memory has been published.

It prints the bytes: the most of the forward passes, the backward passes and the optimizer.
"""

import argparse

import torch
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

WIDTHS = {"0.8b": (1024, 3584), "2b": (2048, 6144)}
"""Of the hidden states, and of the feed-forward layers."""
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
BLOCK = 64
"""Weights that have a scale."""
NESTED = 256
"""Scales of a group that are stored in 8 bits."""


def model(size):
    hidden, inner = WIDTHS[size]
    config = Qwen3_5TextConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        vocab_size=248320,
        tie_word_embeddings=True,
        use_cache=False,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        made = Qwen3_5ForCausalLM(config).to(torch.bfloat16)
    made.to_empty(device="cpu")
    made.tie_weights()
    return made


def with_lora(made):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(made, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


class Unpacked(torch.autograd.Function):
    """The product with a packed weight, which is unpacked for the forward pass and again for the backward pass."""

    @staticmethod
    def forward(ctx, inputs, layer):
        ctx.layer = layer
        return inputs @ layer.unpacked().T

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.layer.unpacked(), None


class Packed(nn.Module):
    """A frozen weight in NF4, two to a byte, with adapters of rank 8 in fp32 beside it."""

    def __init__(self, linear, nested):
        super().__init__()
        blocks = linear.weight.numel() // BLOCK
        self.shape = linear.weight.shape
        self.register_buffer("packed", torch.zeros(blocks * BLOCK // 2, dtype=torch.uint8))
        values = torch.tensor(NF4, dtype=torch.bfloat16)
        self.register_buffer("pairs", torch.stack((values.repeat(16), values.repeat_interleave(16)), 1))
        self.nested = nested
        if nested:
            groups = -(-blocks // NESTED)
            self.register_buffer("scales", torch.zeros(blocks, dtype=torch.uint8))
            self.register_buffer("codes", torch.zeros(256))
            self.register_buffer("of_scales", torch.zeros(groups))
            self.register_buffer("offset", torch.zeros(1))
        else:
            self.register_buffer("scales", torch.zeros(blocks))
        self.down = nn.Parameter(torch.zeros(8, self.shape[1]))
        self.up = nn.Parameter(torch.zeros(self.shape[0], 8))

    def unpacked(self):
        scales = self.scales
        if self.nested:
            scales = self.codes[scales.int()] * self.of_scales.repeat_interleave(NESTED)[: len(scales)] + self.offset
        pairs = nn.functional.embedding(self.packed.int(), self.pairs)
        return (pairs.view(-1, BLOCK) * scales.to(torch.bfloat16)[:, None]).view(self.shape)

    def forward(self, inputs):
        adapted = inputs.float() @ self.down.T @ self.up.T
        return Unpacked.apply(inputs, self) + adapted.to(inputs.dtype) * 2.0


def pack(made, nested):
    made.requires_grad_(False)
    for name, layer in list(made.named_modules()):
        if isinstance(layer, nn.Linear) and layer is not made.lm_head:
            made.set_submodule(name, Packed(layer, nested))
    return made


def peak_of(function):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=WIDTHS)
    parser.add_argument("method", choices=["full", "lora", "nf4", "nested"])
    parser.add_argument("tokens", type=int)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    asked = parser.parse_args()

    made = model(asked.size)
    if asked.method == "lora":
        made = with_lora(made)
    elif asked.method != "full":
        made = pack(made, asked.method == "nested")
    if asked.checkpointing:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if asked.method != "full":
            made.enable_input_require_grads()
    made.train()
    made.to("cuda")
    batches = []
    for _ in range(asked.accumulate):
        tokens = torch.randint(100, 248320, (1, asked.tokens))
        labels = tokens.clone()
        labels[:, : asked.tokens // 2] = -100
        places = torch.arange(asked.tokens).expand(3, 1, -1).clone()
        given = {"input_ids": tokens, "labels": labels, "position_ids": places}
        batches.append({name: value.to("cuda") for name, value in given.items()})
    trained = [weight for weight in made.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=False)
    peaks = []
    kept = None  # The logits and the loss of a batch stay until the next.
    for batch in batches:
        del kept

        def forward(batch=batch):
            outputs = made(**batch, use_cache=False)
            return outputs, outputs.loss / asked.accumulate

        kept, peak = peak_of(forward)
        peaks += [peak, peak_of(kept[1].backward)[1]]
    peaks.append(peak_of(optimizer.step)[1])
    print("peaks", max(peaks), *peaks, sum(weight.numel() for weight in trained), flush=True)


if __name__ == "__main__":
    main()
