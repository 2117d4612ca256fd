"""A loop of accelerate, in fp16 with a scaled loss where there is a GPU."""

import torch
from accelerate import Accelerator
from planted import FOREACH, evaluate, plant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(setup):
    on_gpu = setup.device.type == "cuda"
    accelerator = Accelerator(cpu=not on_gpu, mixed_precision="fp16" if on_gpu else "bf16")
    model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 500))
    optimizer = torch.optim.AdamW(model.parameters(), **FOREACH)
    plant(model[1], optimizer)
    loader = DataLoader(TensorDataset(torch.randint(500, (512, 33))), setup.case.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def loss_of(words):
        return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    setup.evaluation(lambda: evaluate(model, lambda: loss_of(next(iter(loader))[0])))
    while True:
        for (batch,) in loader:
            loss = loss_of(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield loss
