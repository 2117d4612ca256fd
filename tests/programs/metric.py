"""Embeddings of pytorch-metric-learning: the number of pairs that its miner finds depends on values."""

import torch
from planted import FOREACH, evaluate, plant
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner


def train(setup):
    layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)]
    model = torch.nn.Sequential(*layers).to(setup.device)
    loss_of, miner = TripletMarginLoss(), MultiSimilarityMiner()
    optimizer = torch.optim.Adam(model.parameters(), **FOREACH)
    plant(model[2], optimizer)
    setup.watch(model)

    def loss_of_batch():
        embedded = model(torch.randn(setup.case.batch_size, 256).to(setup.device))
        labels = torch.randint(8, (setup.case.batch_size,)).to(setup.device)
        return loss_of(embedded, labels, miner(embedded, labels))

    setup.evaluation(lambda: evaluate(model, loss_of_batch))
    while True:
        loss = loss_of_batch()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
