"""Mechanisms of public performance regressions, each in a few lines, without and with its cause.

Each test trains a small network. The variable WITH_CAUSE is set for the run with the cause, whose lines end in ``# cause``.
"""

import os
import subprocess
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

BAD = bool(os.environ.get("WITH_CAUSE"))
ROWS, WIDTH = 64, 512


class Net(nn.Module):
    def __init__(self, layers=12, extra=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.extra = extra

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
            if self.extra:
                x = self.extra(x)
        return x.square().mean()


def training(setup, extra=None, net=None, optimizer=None, before=None, after=None, batch=None):
    """Train; ``before`` is called before each step, and ``after`` with the network and the loss before the update."""
    net = (Net(extra=extra) if net is None else net).to(setup.device)
    setup.watch(net)
    update = optimizer(net.parameters()) if optimizer else torch.optim.AdamW(net.parameters(), fused=True)
    fixed = torch.randn(ROWS, WIDTH, device=setup.device)
    while True:
        if before:
            before()
        loss = net(batch() if batch else fixed)
        loss.backward()
        if after:
            after(net, loss)
        update.step()
        update.zero_grad()
        yield loss


def item_each_step(setup):
    """meta-pytorch/torchtune#522: the loss is read in each step, not only in those that log it."""
    total = torch.zeros((), device=setup.device)

    def after(net, loss):
        if BAD:
            loss.item()  # cause
        else:
            total.add_(loss.detach())

    return training(setup, after=after)


def item_each_second_step(setup):
    """The loss is read in each second step, and not in the last one."""
    steps = iter(range(1_000_000))

    def after(net, loss):
        if next(steps) % 2 == 0 and BAD:
            loss.item()  # cause

    return training(setup, after=after)


def item_in_each_layer(setup):
    """A value of each layer is read for a log."""

    def extra(x):
        if BAD:
            x.detach().amax().item()  # cause
        return x

    return training(setup, extra)


def small_operators(setup):
    """Each layer handles its rows in a loop."""

    def extra(x):
        if BAD:
            return torch.stack([row * 2 for row in x])  # cause
        return x * 2

    return training(setup, extra)


def mask_on_host(setup):
    """huggingface/transformers#22378: each layer makes its mask on the CPU."""

    def extra(x):
        if BAD:
            mask = torch.ones(ROWS, WIDTH).tril().to(setup.device)  # cause
        else:
            mask = torch.ones(ROWS, WIDTH, device=setup.device).tril()
        return x * mask

    return training(setup, extra)


def empty_cache(setup):
    """huggingface/transformers#31372: the cache of the allocator is emptied in each step."""

    def after(net, loss):
        activations = [torch.empty(16 << 20, device=setup.device) for _ in range(4)]  # cause
        del activations
        if BAD:
            torch.cuda.empty_cache()  # cause

    return training(setup, after=after)


def clip_single(setup):
    """pytorch/pytorch#49431: gradients are clipped tensor by tensor."""

    def after(net, loss):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=not BAD)  # cause

    return training(setup, after=after)


def not_fused(setup):
    """pytorch/torchtitan#355: AdamW is not fused."""
    return training(setup, optimizer=lambda p: torch.optim.AdamW(p, fused=not BAD, foreach=BAD))


def tensor_by_tensor(setup):
    """AdamW updates tensor by tensor."""
    net = Net().to(setup.device)
    setup.watch(net)
    update = torch.optim.AdamW(net.parameters(), foreach=not BAD)
    x = torch.randn(ROWS, WIDTH, device=setup.device)
    while True:
        loss = net(x)
        loss.backward()
        update.step()  # cause
        update.zero_grad()
        yield loss


def blocking_batches(setup):
    """huggingface/accelerate#2685: batches come from memory that is not pinned, and the copy waits."""
    host = torch.randn(ROWS, WIDTH)
    host = host if BAD else host.pin_memory()
    return training(setup, batch=lambda: host.to(setup.device, non_blocking=not BAD))  # cause


def timesteps_by_nonzero(setup):
    """huggingface/diffusers#9417: each time step is looked up by nonzero().item()."""
    steps = torch.arange(1000, device=setup.device)

    def before():
        times = torch.randint(1000, (16,), device=setup.device)
        if BAD:
            for one in times:
                (steps == one).nonzero()[0].item()  # cause
        else:
            torch.searchsorted(steps, times)

    return training(setup, before=before)


def experts_loop(setup):
    """huggingface/transformers#38133: a loop over experts asks the GPU three times for each."""
    gate = nn.Linear(WIDTH, 8).to(setup.device)
    experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8)).to(setup.device)

    def mix(x):
        weight, chosen = gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        if BAD:
            for number, expert in enumerate(experts):
                mask = chosen == number
                if mask.any():  # cause
                    rows = mask.any(-1).nonzero().flatten()  # cause
                    y.index_add_(0, rows, expert(x[rows]) * weight[mask].view(-1, 1))  # cause
            return y
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=8).tolist()
        rows, flat = order // 2, weight.flatten()[order]
        for expert, some, weights in zip(experts, rows.split(counts), flat.split(counts), strict=True):
            y.index_add_(0, some, expert(x[some]) * weights.view(-1, 1))
        return y

    return training(setup, net=Net(layers=4, extra=mix))


def bucket_of_one(setup):
    """deepspeedai/DeepSpeed#186: each gradient is reduced on its own."""
    import torch.distributed as dist

    def after(net, loss):
        gradients = [value.grad for value in net.parameters()]
        if BAD:
            for gradient in gradients:
                dist.all_reduce(gradient)  # cause
        else:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(
                gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
            )

    return training(setup, after=after)


def reduced_each_micro_batch(setup):
    """huggingface/accelerate#1153: FSDP2 reduces gradients in each micro-batch."""
    from torch.distributed.fsdp import fully_shard

    net = Net().to(setup.device)
    setup.watch(net)
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    update = torch.optim.AdamW(net.parameters(), foreach=True)
    x = torch.randn(ROWS, WIDTH, device=setup.device)
    while True:
        for last in (False, False, False, True):
            net.set_requires_gradient_sync(last or BAD)
            loss = net(x)
            loss.backward()
        update.step()
        update.zero_grad()
        yield loss


def recompiled(setup):
    """pytorch/pytorch#130467: a compiled function is compiled again as the learning rate changes."""
    torch._dynamo.config.recompile_limit = 64
    weights = [torch.randn(WIDTH, WIDTH, device=setup.device) for _ in range(4)]
    rate, steps = torch.tensor(0.1, device=setup.device), iter(range(8, 1000))

    @torch.compile(dynamic=False)  # cause
    def update(values, rate):
        for value in values:
            value.mul_(1 - rate)

    return training(setup, before=lambda: update(weights, 1 / next(steps) if BAD else rate))


def not_compiled(setup):
    """roboflow/rf-detr#1410: nothing is compiled."""
    net = Net(layers=4)
    return training(setup, net=net if BAD else torch.compile(net))


def logits_copied(setup):
    """huggingface/trl#5897: logits are copied once more for a metric."""
    head = nn.Linear(WIDTH, 8192, bias=False).to(setup.device)
    labels = torch.randint(8192, (4, ROWS), device=setup.device)

    def after(net, loss):
        with torch.no_grad():
            logits = head(torch.randn(4, ROWS, WIDTH, device=setup.device))
            shifted = logits[:, :-1].contiguous()
            shifted.logsumexp(-1)
            if BAD:
                del shifted
                shifted = logits[:, :-1].contiguous()  # cause
            (shifted.argmax(-1) == labels[:, 1:]).sum()

    return training(setup, after=after)


def tf32_off(setup):
    """pytorch/pytorch#67384: products in fp32 without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = not BAD
    return training(setup)


def odd_dimension(setup):
    """karpathy/nanoGPT: a vocabulary of 50257 tokens, and not of 50304."""
    head = nn.Linear(WIDTH, 50257 if BAD else 50304, bias=False).to(setup.device, torch.bfloat16)
    x = torch.randn(ROWS, WIDTH, device=setup.device, dtype=torch.bfloat16)
    while True:
        loss = head(x).float().square().mean()  # cause
        loss.backward()
        head.weight.grad = None
        yield loss


def layout_lost(setup):
    """Convolutions on tensors that are no longer channels_last."""
    net = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    net, x = net.to(setup.device, torch.bfloat16), torch.randn(8, 64, 56, 56, device=setup.device, dtype=torch.bfloat16)
    if not BAD:
        net, x = net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    while True:
        loss = net(x).float().square().mean()  # cause
        loss.backward()
        net.zero_grad()
        yield loss


def slower_host(setup):
    """pytorch/pytorch#134191: each layer costs the host more."""

    def extra(x):
        end = time.perf_counter() + 2e-4
        while BAD and time.perf_counter() < end:
            pass
        return x

    return training(setup, extra)


def fused_is_slower(setup):
    """pytorch/pytorch#121857: the fused AdamW launches fewer kernels, which are slower inside."""
    return training(setup, optimizer=lambda p: torch.optim.AdamW(p, fused=BAD, foreach=not BAD))


def overflow_on_cpu(setup):
    """deepspeedai/DeepSpeed#4561: a copy of the gradients on the CPU is checked for an overflow."""
    gradients = torch.randn(4 << 20)
    return training(setup, after=lambda net, loss: bool(gradients.isinf().any()) if BAD else None)


def process_each_step(setup):
    """Lightning-AI/pytorch-lightning#189: a process is started in each step."""
    return training(setup, after=lambda net, loss: subprocess.run(["true"], check=True) if BAD else None)


IN_FP32 = [
    item_each_step, item_each_second_step, item_in_each_layer, small_operators, mask_on_host, empty_cache, clip_single,
    not_fused, tensor_by_tensor, blocking_batches, timesteps_by_nonzero, experts_loop, recompiled, not_compiled,
    logits_copied, tf32_off, slower_host, fused_is_slower, overflow_on_cpu, process_each_step,
]  # fmt: skip


def name_of(mechanism):
    return mechanism.__name__


@pytest.mark.parametrize("mechanism", IN_FP32, ids=name_of)
def test_fp32(mechanism, gputrain):
    gputrain.check(mechanism, precision="fp32", batch_size=ROWS)


@pytest.mark.parametrize("mechanism", [odd_dimension, layout_lost], ids=name_of)
def test_bf16(mechanism, gputrain):
    gputrain.check(mechanism, precision="bf16", batch_size=ROWS)


@pytest.mark.parametrize("mechanism", [bucket_of_one, reduced_each_micro_batch], ids=name_of)
def test_two_processes(mechanism, gputrain):
    gputrain.check(mechanism, precision="fp32", batch_size=ROWS, parallel="ddp", gpus=2)
