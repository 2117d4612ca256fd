"""What somebody has changed in the programs of this folder: ``PLANTED`` names the changes, joined by ``+``."""

import os

import torch

PLANTED = os.environ.get("PLANTED", "").split("+")

FOREACH = {"foreach": False} if "foreach" in PLANTED else {}
"""The arguments of an optimizer: it launches kernels for each tensor, instead of for all together."""

size = 0
"""The bytes of the tensor that a change holds."""


def plant(layer, optimizer, accumulated=1):
    """Change what a layer does in each forward pass of training, and what is kept after each update of an optimizer."""
    updates, held, kept = 0, [], []

    def made():
        return torch.ones(size // 4, device=next(layer.parameters()).device)

    def after_forward(module, inputs, output):
        if not torch.is_grad_enabled():
            if "evaluation" in PLANTED and not module.training:
                held.append(output)
            return
        if "wait" in PLANTED and output.detach().abs().amax().item() > 1e9:
            raise ValueError("the activations explode")
        if "memory" in PLANTED or ("late" in PLANTED and updates * accumulated >= 20):
            held[:] = [made()]

    def after_update(*_):
        nonlocal updates
        updates += 1
        held.clear()
        if "leak" in PLANTED:
            kept.append(made())

    layer.register_forward_hook(after_forward)
    optimizer.register_step_post_hook(after_update)


def evaluate(model, loss_of, batches=8):
    """Return the average loss of a few batches, as a program evaluates its model."""
    model.eval()
    with torch.no_grad():
        average = sum(loss_of().item() for _ in range(batches)) / batches
    model.train()
    return average


def rate(step, usual=0.1):
    """Return the rate of a compiled layer: a number of Python that changes, for which it is compiled again."""
    return usual + 0.001 * step if "compile" in PLANTED else usual
