import torch
from torch import nn
from torch.utils.checkpoint import checkpoint  # noqa: F401


def train(setup):
    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)]
    model = nn.ModuleList(blocks).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        batch = torch.randn(256, 512, device=setup.device)
        hidden = batch
        for block in model:
            hidden = block(hidden)
        loss = (hidden - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_training(gputrain):
    gputrain.check(train, precision="fp32", batch_size=256)
