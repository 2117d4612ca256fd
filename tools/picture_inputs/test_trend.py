import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def train(setup):
    blocks = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6)]
    model = nn.ModuleList(blocks).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        batch = torch.randn(512, 128, device=setup.device)
        hidden = batch
        for block in model:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        loss = (hidden - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_training(gputrain):
    gputrain.check(train, precision="fp32", batch_size=512)
