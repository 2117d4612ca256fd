"""Training steps with PyTorch Geometric: networks on random graphs."""

import torch

NODES, EDGES, WIDTH, KINDS = 512, 2048, 64, 8


def in_turn(*loops):
    """Yield from each loop in turn, so that one process trains all models, and each of its steps is judged."""
    while True:
        for loop in loops:
            yield next(loop)


def train(setup, model, loss_of):
    """Yield the loss after each step on a new graph, which the host hands over."""
    from torch_geometric.data import Batch, Data

    model = model.to(setup.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    while True:
        graphs = [
            Data(
                x=torch.randn(NODES // 4, WIDTH),
                edge_index=torch.randint(NODES // 4, (2, EDGES // 4)),
                edge_attr=torch.randn(EDGES // 4, WIDTH),
                edge_type=torch.randint(4, (EDGES // 4,)),
                pos=torch.randn(NODES // 4, 3),
                y=torch.randint(KINDS, (1,)),
            )
            for _ in range(4)
        ]
        graph = Batch.from_data_list(graphs).to(setup.device)
        loss = loss_of(model, graph)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def pooled(outputs, graph):
    """The loss of one label a graph."""
    from torch_geometric.nn import global_mean_pool

    return torch.nn.functional.cross_entropy(global_mean_pool(outputs, graph.batch, size=4), graph.y)


def basic(setup, name, options=None):
    """One of the library's finished networks."""
    from torch_geometric.nn import models

    model = getattr(models, name)(WIDTH, WIDTH, num_layers=3, out_channels=KINDS, norm="batch", **(options or {}))
    return train(setup, model, lambda model, graph: pooled(model(graph.x, graph.edge_index), graph))


class Stack(torch.nn.Module):
    """Convolutions one after the other, with edge features where they take them."""

    def __init__(self, layers, takes):
        super().__init__()
        self.layers, self.takes = torch.nn.ModuleList(layers), takes
        self.head = torch.nn.Linear(WIDTH, KINDS)

    def forward(self, graph):
        x = graph.x
        for layer in self.layers:
            x = x + layer(x, graph.edge_index, *(getattr(graph, name) for name in self.takes)).relu()
        return self.head(x)


def stack(setup, name, depth=3, takes=(), options=None):
    """A stack of one kind of convolution."""
    from torch_geometric import nn

    layers = [getattr(nn, name)(WIDTH, WIDTH, **(options or {})) for _ in range(depth)]
    return train(setup, Stack(layers, takes), lambda model, graph: pooled(model(graph), graph))


def deeper(setup):
    """DeeperGCN, as in the library's example: many residual blocks with softmax aggregation."""
    from torch_geometric.nn import DeepGCNLayer, GENConv, LayerNorm

    layers = [
        DeepGCNLayer(
            GENConv(WIDTH, WIDTH, aggr="softmax", t=1.0, learn_t=True, num_layers=2, norm="layer"),
            LayerNorm(WIDTH),
            torch.nn.ReLU(),
            block="res+",
            dropout=0.1,
        )
        for _ in range(28)
    ]
    return train(setup, Deep(layers), lambda model, graph: pooled(model(graph), graph))


class Deep(torch.nn.Module):
    """Blocks of DeeperGCN and a head."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.head = torch.nn.ModuleList(layers), torch.nn.Linear(WIDTH, KINDS)

    def forward(self, graph):
        x = graph.x
        for layer in self.layers:
            x = layer(x, graph.edge_index, graph.edge_attr)
        return self.head(x)


class Dense(torch.nn.Module):
    """A graph transformer: local convolutions, and attention over dense batches."""

    def __init__(self):
        from torch_geometric.nn import GINConv, GPSConv

        super().__init__()
        self.layers = torch.nn.ModuleList(
            GPSConv(WIDTH, GINConv(torch.nn.Linear(WIDTH, WIDTH)), heads=4, norm="batch_norm") for _ in range(3)
        )
        self.head = torch.nn.Linear(WIDTH, KINDS)

    def forward(self, graph):
        x = graph.x
        for layer in self.layers:
            x = layer(x, graph.edge_index, graph.batch)
        return self.head(x)


def transformer(setup):
    """A graph transformer."""
    return train(setup, Dense(), lambda model, graph: pooled(model(graph), graph))


def networks(setup):
    """Six kinds of networks."""
    transformer_options = {"heads": 4, "concat": False, "edge_dim": WIDTH, "beta": True}
    return in_turn(
        basic(setup, "GCN"),
        basic(setup, "GAT", {"v2": True, "heads": 4}),
        stack(setup, "SAGEConv", options={"aggr": ["mean", "max", "std", "powermean", "softmax"]}),
        stack(setup, "TransformerConv", 12, ["edge_attr"], transformer_options),
        stack(setup, "RGATConv", 3, ["edge_type"], {"num_relations": 4}),
        transformer(setup),
    )


def test_networks(gputrain):
    gputrain.check(networks, precision="fp32", batch_size=4, warmup=6, steps=12, gradient_accumulation=6)


def test_a_deep_network(gputrain):
    gputrain.check(deeper, precision="fp32", batch_size=4, warmup=1, steps=3)
