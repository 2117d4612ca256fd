"""The FLOPs of convolutions, by hand: channels of other groups are not multiplied, in no pass."""

import pytest
import torch
from torch import nn

from pytest_gputrain.worker.flops import count_flops


@pytest.mark.parametrize(
    ("layer", "shape", "products"),
    [
        # Products in the forward pass: images x positions x channels x those of their group x places of the kernel.
        (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 5, 5), 2 * 25 * 4 * 3 * 9),
        (nn.Conv1d(4, 6, 3, groups=2), (1, 4, 8), 6 * 6 * 2 * 3),
        (nn.Conv2d(256, 256, 3, padding=1, groups=256), (2, 256, 5, 5), 2 * 25 * 256 * 9),
        (nn.Conv2d(8, 16, 3, stride=2, padding=1, dilation=2, groups=8), (1, 8, 9, 9), 16 * 16 * 1 * 9),
        (nn.Conv3d(6, 6, 2, groups=3), (1, 6, 3, 3, 3), 8 * 6 * 2 * 8),
        (nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 5), 2 * 5 * 4 * 6 * 3),
        (nn.ConvTranspose2d(8, 4, 2, stride=2, groups=4), (3, 8, 4, 4), 3 * 16 * 8 * 1 * 4),
        (nn.ConvTranspose3d(4, 4, 2, groups=4), (1, 4, 2, 2, 2), 8 * 4 * 1 * 8),
    ],
    ids=str,
)
def test_each_gradient_of_a_convolution_has_the_flops_of_its_forward_pass(layer, shape, products):
    given = torch.ones(shape, requires_grad=True)

    def flops_of(run):
        with count_flops() as counted:
            result = run()
        return counted.total, result

    forward, result = flops_of(lambda: layer(given))
    both, _ = flops_of(
        lambda: torch.autograd.grad(result, [given, layer.weight], torch.ones_like(result), retain_graph=True)
    )
    one, _ = flops_of(lambda: torch.autograd.grad(layer(given.detach()), layer.weight, torch.ones_like(result)))
    assert forward == 2 * products
    assert both == 2 * forward
    assert one == 2 * forward, "its own forward pass, and the gradient of the weight"
