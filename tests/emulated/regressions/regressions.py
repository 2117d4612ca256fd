"""Public regressions of whole runs of training libraries, each in a few lines, without and with its cause.

The variable WITH_CAUSE is set for the run with the cause.
"""

import copy
import functools
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

BAD = bool(os.environ.get("WITH_CAUSE"))
ROWS, WIDTH, WORDS = 32, 128, 1024
EVERY = 8


class Net(nn.Module):
    def __init__(self, layers=4, extra=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.extra = extra

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
            if self.extra:
                x = self.extra(x)
        return x


class Words(nn.Module):
    """A network with a head of many words, of which it returns the logits."""

    def __init__(self):
        super().__init__()
        self.net, self.head = Net(), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.head(self.net(x))


def mean(output, step):
    return output.square().mean()


def training(setup, net=None, loss_of=mean, batch=None, after=None, between=None, set_to_none=True):
    """Train; ``after`` is called before each update with the loss, and ``between`` after it with the number of steps."""
    net = (Net() if net is None else net).to(setup.device)
    setup.watch(net)
    update = torch.optim.AdamW(net.parameters())
    fixed = torch.randn(ROWS, WIDTH, device=setup.device)
    step = 0
    while True:
        loss = loss_of(net(batch(step) if batch else fixed), step)
        loss.backward()
        if after:
            after(net, loss)
        update.step()
        update.zero_grad(set_to_none=set_to_none)
        step += 1
        if between:
            between(net, loss, update, step)
        yield loss.detach()


def graph_of_all_losses(setup):
    """huggingface/transformers#6939: the sum of the losses keeps the graphs of all steps, which is memory of the host."""
    total = torch.zeros((), device=setup.device)

    def after(net, loss):
        nonlocal total
        total = total + (loss if BAD else loss.detach())

    return training(setup, Net(layers=60), after=after)


def metric_without_reset(setup):
    """Lightning-AI/torchmetrics#2481: a metric keeps the scores of all steps."""
    kept = []

    def loss_of(output, step):
        scores = (output.repeat(2, 1) @ output.repeat(2, 1).T).detach()
        if not BAD:
            kept.clear()
        kept.append(scores)
        return mean(output, step)

    return training(setup, loss_of=loss_of)


def cache_of_each_length(setup):
    """unslothai/unsloth#7678: a cache of masks keeps one for each length of a batch."""

    @functools.lru_cache(maxsize=None if BAD else 1)
    def mask(length):
        return torch.ones(length, length, device=setup.device).tril()

    def batch(step):
        length = 64 + step
        return mask(length) @ torch.randn(length, WIDTH, device=setup.device)

    return training(setup, batch=batch)


def samples_in_a_cache(setup):
    """MoonshotAI/Kimi-Audio#117: a data set keeps every sample that it has read."""

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 1_000_000

        @functools.lru_cache(maxsize=None if BAD else ROWS)  # noqa: B019
        def __getitem__(self, index):
            return np.full((8, WIDTH), index % 7, dtype=np.float32)

    loader = iter(torch.utils.data.DataLoader(Samples(), batch_size=ROWS))
    return training(setup, batch=lambda step: next(loader).to(setup.device).mean(1))


def logits_until_the_next(setup):
    """meta-pytorch/torchtune#1046, espnet/espnet#5921: the last step's logits live in the next forward pass."""
    net = Words().to(setup.device)
    setup.watch(net)
    update = torch.optim.AdamW(net.parameters())
    x = torch.randn(ROWS * 8, WIDTH, device=setup.device)
    labels = torch.randint(WORDS, (ROWS * 8,), device=setup.device)
    while True:
        logits = net(x)
        loss = F.cross_entropy(logits, labels)
        if not BAD:
            del logits
        loss.backward()
        update.step()
        update.zero_grad()
        yield loss.detach()


def reference_cycle(setup):
    """meta-pytorch/torchrec#1226: an awaitable refers to itself, so that its tensor lives until garbage is collected."""

    class Awaitable:
        def __init__(self, value):
            self.value = value
            self.callback = self.wait if BAD else None

        def wait(self):
            return self.value

    return training(setup, net=Net(extra=lambda x: Awaitable(x * 2).wait()))


def inputs_in_fp32(setup):
    """AgileRL/AgileRL#623: the inputs of LoRA's adapters are copied to fp32, and kept for the backward pass."""

    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

        def forward(self, x):
            given = x.float() if BAD else x
            with torch.autocast(setup.device.type, torch.bfloat16):
                return self.base(x) + self.up(self.down(given))

    def batch(step):
        return torch.randn(ROWS * 8, WIDTH, device=setup.device).bfloat16()

    return training(
        setup, nn.Sequential(*(Lora() for _ in range(4))), lambda output, step: mean(output.float(), step), batch
    )


def whole_log_softmax(setup):
    """huggingface/trl#2799: for the logarithms of a few words those of all words are computed."""
    labels = torch.randint(WORDS, (ROWS * 8, 1), device=setup.device)
    reference = Words().to(setup.device)

    @torch.no_grad()
    def after(net, loss):
        logits = reference(torch.randn(ROWS * 8, WIDTH, device=setup.device))
        if BAD:
            logits.log_softmax(-1).gather(-1, labels)
        else:
            for some, chosen in zip(logits.split(64), labels.split(64), strict=True):
                some.gather(-1, chosen).squeeze(-1) - some.logsumexp(-1)

    return training(setup, after=after)


def row_by_row(setup):
    """huggingface/trl#7125: a loop computes the logarithm of each row."""
    labels = torch.randint(WORDS, (ROWS, 1), device=setup.device)

    def loss_of(logits, step):
        sums = torch.stack([row.logsumexp(-1) for row in logits]) if BAD else logits.logsumexp(-1)
        return (sums - logits.gather(-1, labels).squeeze(-1)).mean()

    return training(setup, Words(), loss_of)


def clipping_that_looks(setup):
    """pytorch/pytorch#60691: gradients are clipped only if a comparison, which the host waits for, says so."""

    def after(net, loss):
        gradients = [value.grad for value in net.parameters()]
        ratio = 1 / (torch.nn.utils.get_total_norm(gradients) + 1e-6)
        if BAD:
            if ratio < 1:
                torch._foreach_mul_(gradients, ratio)
        else:
            torch._foreach_mul_(gradients, ratio.clamp(max=1))

    return training(setup, after=after)


def synchronized_log(setup):
    """pytorch/torchtitan#134: each step waits for the GPU, to log its time."""

    def between(net, loss, update, step):
        if BAD and setup.device.type == "cuda":
            torch.cuda.synchronize()

    return training(setup, between=between)


def loss_of_all_ranks(setup):
    """huggingface/pytorch-image-models#2340: the loss is averaged over all processes in each step, not in those that log."""
    import torch.distributed as dist

    def between(net, loss, update, step):
        if BAD or step % 50 == 0:
            dist.all_reduce(loss.detach().clone())

    net = nn.parallel.DistributedDataParallel(Net().to(setup.device))
    return training(setup, net, between=between)


def counter_of_a_module(setup):
    """pytorch/pytorch#128319: a module counts its calls, and is compiled again for each number."""

    class Counting(Net):
        calls = 0

        def forward(self, x):
            if BAD:
                self.calls += 1
            return super().forward(x)

    return training(setup, torch.compile(Counting(layers=2), dynamic=False))


def mask_of_attention(setup):
    """huggingface/transformers#30461: attention gets a causal mask, which its kernel would know without."""
    length = 256

    def extra(x):
        heads = x.view(1, length, 4, WIDTH // 4).transpose(1, 2)
        if BAD:
            mask = torch.ones(length, length, dtype=torch.bool, device=setup.device).tril()
            heads = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        else:
            heads = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return heads.transpose(1, 2).reshape(length, WIDTH)

    return training(setup, Net(extra=extra), batch=lambda step: torch.randn(length, WIDTH, device=setup.device))


def tensor_of_many_arrays(setup):
    """huggingface/transformers#24772: a batch is made of a list of arrays, one by one."""
    rows = [np.random.default_rng(0).random(WIDTH, dtype=np.float32) for _ in range(ROWS)]
    return training(setup, batch=lambda step: torch.tensor(rows if BAD else np.array(rows)).to(setup.device))


@torch.no_grad()
def outputs(setup, net, batches=6):
    for _ in range(batches):
        yield net(torch.randn(ROWS * 4, WIDTH, device=setup.device))


def outputs_until_the_next_evaluation(setup):
    """Lightning-AI/pytorch-lightning#5735: the outputs of an evaluation live until the next one."""
    net, kept = Net().to(setup.device), []

    @setup.evaluation
    def evaluate():
        kept[:] = outputs(setup, net)
        torch.stack([each.mean() for each in kept]).mean()
        if not BAD:
            kept.clear()

    return training(setup, net)


def embeddings_on_the_device(setup):
    """huggingface/sentence-transformers#487: an evaluation keeps all embeddings on the device."""
    net = Net().to(setup.device)
    setup.evaluation(lambda: torch.stack([each if BAD else each.mean() for each in outputs(setup, net)]))
    return training(setup, net)


def gradients_in_an_evaluation(setup):
    """speechbrain/speechbrain#1739: zeroed gradients stay on the device while it evaluates."""
    net = Net(layers=12).to(setup.device)
    setup.evaluation(lambda: [each.mean() for each in outputs(setup, net)])
    return training(setup, net, set_to_none=not BAD)


def checkpoint_cloned(setup):
    """Lightning-AI/pytorch-lightning#21630: an asynchronous checkpoint clones each tensor on the device."""
    net = Net().to(setup.device)

    @setup.checkpoint
    def save(folder):
        states = [*net.state_dict().values()]
        torch.save([value.clone() for value in states] if BAD else states, folder / "last.pt")

    return training(setup, net)


def copy_of_each_checkpoint(setup):
    """lucidrains/ema-pytorch#35: the copy of the model that a checkpoint makes is never freed."""
    net, kept = Net().to(setup.device), []

    @setup.checkpoint
    def save(folder):
        twin = copy.deepcopy(net)
        torch.save(twin.state_dict(), folder / "last.pt")
        if BAD:
            kept.append(twin)

    return training(setup, net)


def checkpoint_twice_on_the_host(setup):
    """meta-pytorch/torchtune#1315: a checkpoint copies all weights to the host, and converts the copies."""
    net = Net().to(setup.device)

    @setup.checkpoint
    def save(folder):
        states = {name: value.detach().cpu() for name, value in net.state_dict().items()}
        torch.save({name: value.clone() for name, value in states.items()} if BAD else states, folder / "last.pt")

    return training(setup, net)


def histograms_now_and_then(setup):
    """wandb/wandb#1171: histograms of all gradients are made every 100 steps, instead of every 1000."""

    def after(net, loss):
        after.step += 1
        if after.step % (EVERY if BAD else 1000) == 0:
            torch.cat([value.grad.flatten().abs().add(1e-6).log2() for value in net.parameters()]).histc(64).tolist()

    after.step = 0
    return training(setup, after=after)


def name_of(program):
    return program.__name__


@pytest.mark.parametrize(
    "program",
    [
        graph_of_all_losses, metric_without_reset, cache_of_each_length, samples_in_a_cache, logits_until_the_next,
        reference_cycle, whole_log_softmax, row_by_row, clipping_that_looks, synchronized_log, counter_of_a_module,
        mask_of_attention, tensor_of_many_arrays, outputs_until_the_next_evaluation, embeddings_on_the_device,
        gradients_in_an_evaluation, checkpoint_cloned, copy_of_each_checkpoint, checkpoint_twice_on_the_host,
        histograms_now_and_then,
    ],
    ids=name_of,
)  # fmt: skip
def test_fp32(program, gputrain):
    gputrain.check(program, precision="fp32", batch_size=ROWS)


@pytest.mark.parametrize("program", [inputs_in_fp32], ids=name_of)
def test_amp(program, gputrain):
    gputrain.check(program, precision="bf16-amp", batch_size=ROWS)


@pytest.mark.parametrize("program", [loss_of_all_ranks], ids=name_of)
def test_two_processes(program, gputrain):
    gputrain.check(program, precision="fp32", batch_size=ROWS, parallel="ddp", gpus=2)
