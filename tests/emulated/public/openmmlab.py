"""Trains as the runners of OpenMMLab did from 2020 to 2022, whose logs have the most memory that torch had allocated."""

import torch
from peaks import print_peaks
from torch import distributed, nn

UPDATES = 3


def train(model, losses, *, clip=None, adam=False, nesterov=False, find_unused=False):
    """Update a model by SGD with momentum or by Adam, and print its peaks.

    The gradients go through the buckets of ``DistributedDataParallel``, though this is one process: a bucket has the same
    size with eight. torch before 2.0 kept gradients as zeros between the updates, and its optimizers had no fused kernels.

    Args:
        losses: makes the loss of a batch, from the wrapped model.
        clip: the largest norm of the gradients; None if they are not clipped.
    """
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    model.train().cuda()
    wrapped = nn.parallel.DistributedDataParallel(
        model, device_ids=[0], broadcast_buffers=False, find_unused_parameters=find_unused
    )
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if adam:
        optimizer = torch.optim.Adam(weights, lr=1e-3, weight_decay=1e-4, foreach=False)
    else:
        optimizer = torch.optim.SGD(weights, 0.01, 0.9, weight_decay=1e-4, nesterov=nesterov, foreach=False)
    for _ in range(UPDATES):
        loss = losses(wrapped)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False)
        optimizer.step()
    print_peaks(model)
    distributed.destroy_process_group()
