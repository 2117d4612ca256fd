"""Own code trains in the precision that its case names, or fails with the name of the one that it trains in."""

import pytest
import torch
from torch import nn
from zoo_examples import MINE, measured, refused

from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.precision import PRECISIONS, check_precision, weights_by_type

MINE = MINE.replace(steps=1, warmup=0)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def training(weights=FP32, casts=False, watched=True, model=None, optimizer=torch.optim.SGD):
    """A builder; it casts as the case says, or not at all."""

    def build(setup):
        made = (model() if model else nn.Linear(64, 64)).to(weights or setup.dtype)
        updates = optimizer(made.parameters(), lr=0.1)
        if watched:
            setup.watch(made)

        def step():
            with setup.casting() if casts else torch.autocast("cpu", enabled=False):
                loss = made(torch.ones(8, 64, dtype=next(made.parameters()).dtype)).square().mean()
            loss.backward()
            updates.step()
            updates.zero_grad()
            return loss

        return step

    return build


@pytest.mark.parametrize(
    ("label", "how", "named"),
    [
        ("bf16", {"casts": True}, '"fp32"'),
        ("bf16-amp", {"watched": False}, '"fp32"'),
        ("fp32", {"weights": BF16}, '"bf16"'),
        ("fp32", {"weights": BF16, "watched": False}, '"bf16" or "bf16-amp"'),
        ("fp16-amp", {}, '"fp32"'),
    ],
)
def test_another_precision_than_the_case_names_fails_it(label, how, named):
    sentence = refused(MINE.replace(precision=label), training(**how))
    assert f'mine does not train in precision "{label}"' in sentence
    assert f"; say precision={named}, or train" in sentence


@pytest.mark.parametrize("label", ["fp32", "bf16", "bf16-amp", "fp16-amp"])
@pytest.mark.parametrize("watched", [True, False])
def test_what_setup_gives_is_the_precision_of_the_case(label, watched):
    measured(MINE.replace(precision=label), training(weights=None, casts=True, watched=watched))


class Tower(nn.Module):
    """Adapters, a norm and a head in fp32 around a base in bf16."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 256)
        self.adapter = nn.Linear(64, 8)
        self.norm = nn.LayerNorm(256)

    def to(self, dtype):
        super().to(dtype)
        for part in (self.adapter, self.norm):
            part.to(FP32)
        return self

    def forward(self, x):
        return self.norm(self.base(x).float())[:, 0].mean() + self.adapter(x.float()).mean()


def test_adapters_and_norms_in_fp32_are_still_bf16_and_autocast_over_fp32_is_not():
    def build(setup):
        setup.precision = PRECISIONS["bf16-amp"]
        return training(casts=True)(setup)

    measured(MINE.replace(precision="bf16"), training(weights=BF16, model=Tower))
    assert '; say precision="bf16-amp", or' in refused(MINE.replace(precision="bf16"), build)


def test_products_of_an_optimizer_are_not_the_model_s():
    class Orthogonal(torch.optim.SGD):
        def _init_group(self, *args):
            for _ in range(20):
                torch.ones(64, 64, dtype=BF16) @ torch.ones(64, 64, dtype=BF16)
            return super()._init_group(*args)

    assert measured(MINE.replace(precision="fp32"), training(optimizer=Orthogonal)).flops_per_step > 20 * 2 * 64**3


@pytest.mark.parametrize(
    ("label", "weights", "flops"),
    [
        ("bf16", {}, {}),
        ("bf16", {BF16: 7, FP32: 3}, {BF16: 5, FP32: 5}),  # a head in fp32
        ("bf16", {FP32: 6, BF16: 4}, {BF16: 95, FP32: 5}),  # a frozen tower in fp32
        ("bf16", {BF16: 10}, {FP32: 10}),  # no label means this
        ("bf16", {}, {FP32: 6, BF16: 4}),
        ("bf16", {BF16: 10}, {torch.int8: 10}),
        ("bf16", {BF16: 10}, {torch.float8_e4m3fn: 10}),
        ("fp32", {torch.float64: 10}, {torch.float64: 10}),
        ("fp32", {FP32: 10}, {FP32: 5, BF16: 5}),
        ("bf16-amp", {FP32: 10}, {FP32: 5, BF16: 5}),
        ("fp16-amp", {FP16: 10}, {FP16: 10}),
    ],
)
def test_what_no_other_label_means_better_passes(label, weights, flops):
    check_precision("mine", label, weights, flops)


@pytest.mark.parametrize(
    ("label", "weights", "flops", "named"),
    [
        ("bf16", {FP32: 6, BF16: 4}, {FP32: 6, BF16: 4}, '"fp32"'),
        ("bf16", {FP32: 95, BF16: 5}, {BF16: 10}, '"bf16-amp"'),
        ("fp32", {FP32: 10}, {BF16: 10}, '"bf16-amp"'),
        ("fp32", {FP32: 10}, {FP16: 10}, '"fp16-amp"'),
        ("fp32", {BF16: 6, FP32: 4}, {}, '"bf16"'),
        ("bf16", {FP32: 10}, {}, '"fp32" or "bf16-amp" or "fp16-amp"'),
        ("bf16", {FP32: 10}, {FP32: 9, BF16: 1}, '"fp32"'),
    ],
)
def test_the_label_that_fits_is_named(label, weights, flops, named):
    with pytest.raises(CheckFailed, match=f"say precision={named}, or"):
        check_precision("mine", label, weights, flops)


def test_weights_in_four_bits_count_as_what_they_compute_in_tied_ones_once_and_whole_numbers_not_at_all():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=BF16, quant_type="nf4").to("cpu")
    assert weights_by_type(nn.Sequential(layer, nn.LayerNorm(8))) == {BF16: 64 * 64 // 2, FP32: 2 * 8 * 4}
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    first.register_parameter("counts", nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False))
    first.register_parameter("phase", nn.Parameter(torch.ones(4, dtype=torch.complex64)))
    assert weights_by_type(nn.Sequential(first, second)) == {FP32: 8 * 8 * 4 + 4 * 8}
