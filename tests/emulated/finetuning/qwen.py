"""One update of Qwen3.5's language model on random tokens, whose peak of allocated memory has been published.

Each process prints the peaks of each forward pass, each backward pass and the optimizer, in bytes, and how many weights are
trained.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
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
            self.register_buffer("codes", torch.zeros(256, 1))
            self.register_buffer("of_scales", torch.zeros(groups))
            self.register_buffer("offset", torch.zeros(()))
        else:
            self.register_buffer("scales", torch.zeros(blocks))
        self.down = nn.Parameter(torch.zeros(8, self.shape[1]))
        self.up = nn.Parameter(torch.zeros(self.shape[0], 8))

    def unpacked(self):
        scales = self.scales
        if self.nested:
            scales = nn.functional.embedding(scales.int(), self.codes).view(-1)
            scales.mul_(self.of_scales.repeat_interleave(NESTED)[: len(scales)]).add_(self.offset)
        scales = scales.to(torch.bfloat16)
        pairs = nn.functional.embedding(self.packed.int(), self.pairs)
        return (pairs.view(-1, BLOCK) * scales[:, None]).view(self.shape)

    def forward(self, inputs):
        # The published program has this order. With the adapters first 16 tokens take 0.8 MiB more.
        product = Unpacked.apply(inputs, self)
        adapted = inputs.float() @ self.down.T @ self.up.T
        return product + adapted.to(inputs.dtype) * 2.0


def pack(made, nested):
    made.requires_grad_(False)
    for name, layer in list(made.named_modules()):
        if isinstance(layer, nn.Linear) and layer is not made.lm_head:
            made.set_submodule(name, Packed(layer, nested))
    return made


def with_fsdp(made):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layers = ModuleWrapPolicy({type(made.model.layers[0])})
    return FullyShardedDataParallel(
        made, auto_wrap_policy=layers, device_id=torch.cuda.current_device(), backward_prefetch=None
    )


def with_fsdp2(made):
    from torch.distributed.fsdp import fully_shard

    for layer in made.get_decoder().layers:
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(made, reshard_after_forward=True)


def with_zero(made, optimizer):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": 5_000_000,
            "stage3_prefetch_bucket_size": 5_000_000,
            "stage3_param_persistence_threshold": 100_000,
        },
    }
    return deepspeed.initialize(model=made, optimizer=optimizer, config=config)[0]


def prepare(asked):
    """Return the model on the GPU; DeepSpeed shards it later."""
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
    if asked.sharded == "fsdp":
        return with_fsdp(made)
    made.to("cuda")
    return with_fsdp2(made) if asked.sharded == "fsdp2" else made


def random_batch(length):
    tokens = torch.randint(100, 248320, (1, length))
    labels = tokens.clone()
    labels[:, : length // 2] = -100
    places = torch.arange(length).expand(3, 1, -1).clone()
    given = {"input_ids": tokens, "labels": labels, "position_ids": places}
    return {name: value.to("cuda") for name, value in given.items()}


def peak_of(function, *arguments):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = function(*arguments)
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated()


def update(asked):
    """Return the peaks, and how many weights are trained."""
    made = prepare(asked)
    batches = [random_batch(asked.tokens) for _ in range(asked.accumulate)]
    trained = [weight for weight in made.parameters() if weight.requires_grad]
    weights = sum(weight.numel() for weight in trained)
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=False)
    backward, step = torch.Tensor.backward, optimizer.step
    if asked.sharded == "zero3":
        made = with_zero(made, optimizer)
        backward, step = made.backward, made.step

    def forward(batch):
        outputs = made(**batch, use_cache=False)
        return outputs, outputs.loss / asked.accumulate

    peaks = []
    kept = None  # The logits and the loss of a batch stay until the next.
    for batch in batches:
        del kept
        kept, peak = peak_of(forward, batch)
        peaks += [peak, peak_of(backward, kept[1])[1]]
    return [*peaks, peak_of(step)[1], weights]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=WIDTHS)
    parser.add_argument("method", choices=["full", "lora", "nf4", "nested"])
    parser.add_argument("tokens", type=int)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--sharded", choices=["fsdp", "fsdp2", "zero3"], help="by two processes, with a GPU each")
    asked = parser.parse_args()
    if asked.sharded and "RANK" not in os.environ:
        command = ["-m", "torch.distributed.run", "--nproc-per-node=2", *sys.argv]
        os.execv(sys.executable, [sys.executable, *command])
    if asked.sharded:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    print(end=f"peaks {update(asked)}\n", flush=True)  # in one piece, since all processes print
    if asked.sharded:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
