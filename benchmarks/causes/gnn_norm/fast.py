"""Node classification with a graph convolutional network on a graph of communities."""

import time

import torch
import torch.nn.functional as F
from torch import nn


def community_graph(nodes, classes, degree, generator):
    """Edges mostly within a community; features are noisy indicators of it."""
    labels = torch.randint(0, classes, (nodes,), generator=generator)
    order = labels.argsort()
    position = torch.empty_like(order)
    position[order] = torch.arange(nodes)
    source = torch.arange(nodes).repeat_interleave(degree)
    jump = torch.randint(-20, 21, (len(source),), generator=generator)
    target = order[(position[source] + jump) % nodes]
    features = F.one_hot(labels, classes).float() @ torch.randn(classes, 32, generator=generator)
    features += 3 * torch.randn(nodes, 32, generator=generator)
    return features, torch.stack([source, target]), labels


def symmetric_norm(edge_index, nodes):
    """Undirected edges with self-loops, each once, and the weights of a symmetric normalisation."""
    loops = torch.arange(nodes).expand(2, -1)
    edges = torch.cat([edge_index, edge_index.flip(0), loops], dim=1)
    keys = torch.unique(edges[0] * nodes + edges[1])
    row, column = keys // nodes, keys % nodes
    degree = torch.bincount(row, minlength=nodes).float()
    scale = degree.rsqrt()
    return row, column, scale[row] * scale[column]


class GCNConv(nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.linear = nn.Linear(dim_in, dim_out)

    def forward(self, x, graph):
        row, column, weight = graph
        x = self.linear(x)
        messages = weight[:, None] * x.index_select(0, column)
        return torch.zeros_like(x).index_add_(0, row, messages)


class GCN(nn.Module):
    def __init__(self, dim_in, hidden, classes):
        super().__init__()
        self.conv1 = GCNConv(dim_in, hidden)
        self.conv2 = GCNConv(hidden, classes)

    def forward(self, x, graph):
        x = F.relu(self.conv1(x, graph))
        return self.conv2(x, graph)


def accuracy(logits, labels, mask):
    return (logits.argmax(1) == labels)[mask].float().mean().item()


def main(epochs=200, nodes=6000, classes=7):
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    features, edge_index, labels = community_graph(nodes, classes, 8, generator)
    graph = symmetric_norm(edge_index, nodes)
    train_mask = torch.rand(nodes, generator=generator) < 0.2
    model = GCN(features.shape[1], 16, classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=5e-4)
    began = time.time()
    for epoch in range(1, epochs + 1):
        optimizer.zero_grad()
        logits = model(features, graph)
        loss = F.cross_entropy(logits[train_mask], labels[train_mask])
        loss.backward()
        optimizer.step()
        if epoch % 40 == 0:
            test = accuracy(logits.detach(), labels, ~train_mask)
            print(
                f"epoch {epoch:3d} loss {loss.item():.4f} test accuracy {test:.3f} ({time.time() - began:.1f} s)"
            )


if __name__ == "__main__":
    main()
