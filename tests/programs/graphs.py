"""Graphs of different sizes in torch_geometric: messages along edges, and pooling of the best nodes."""

import torch
from planted import FOREACH, evaluate, plant
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, SAGEConv, TopKPooling, global_mean_pool


class Model(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first, self.pool, self.second = SAGEConv(64, width), TopKPooling(width, 0.5), GCNConv(width, width)
        self.head = torch.nn.Linear(width, 10)

    def forward(self, data):
        nodes = self.first(data.x, data.edge_index).relu()
        nodes, edges, _, batch, _, _ = self.pool(nodes, data.edge_index, batch=data.batch)
        return self.head(global_mean_pool(self.second(nodes, edges).relu(), batch))


def graph(nodes):
    return Data(x=torch.randn(nodes, 64), edge_index=torch.randint(nodes, (2, 4 * nodes)), y=torch.randint(10, (1,)))


def train(setup):
    loader = DataLoader([graph(20 + number % 40) for number in range(4 * setup.case.batch_size)], setup.case.batch_size)
    model = Model().to(setup.device)
    optimizer = torch.optim.Adam(model.parameters(), **FOREACH)
    plant(model.first, optimizer)
    setup.watch(model)

    def loss_of(batch):
        return torch.nn.functional.cross_entropy(model(batch), batch.y)

    setup.evaluation(lambda: evaluate(model, lambda: loss_of(next(iter(loader)).to(setup.device))))
    while True:
        for batch in loader:
            loss = loss_of(batch.to(setup.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
