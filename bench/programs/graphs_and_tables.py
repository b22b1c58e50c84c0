"""Models of graphs, of tables and of who likes what."""

from __future__ import annotations

import importlib
from typing import Any

from bench.programs._shared import Step, descend, module, perceptron, training


def click_model(torch: Any) -> Step:
    """Bags of embeddings and a tower, with sparse gradients."""
    nn = torch.nn
    bags = nn.EmbeddingBag(200_000, 64, mode="sum", sparse=True).cuda()
    tower = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1)).cuda()
    ids = torch.randint(200_000, (4096, 20), device="cuda")
    clicks = torch.rand(4096, 1, device="cuda")
    sparse = torch.optim.SparseAdam(bags.parameters())
    dense = torch.optim.Adam(tower.parameters(), fused=True)

    def step() -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(tower(bags(ids)), clicks)
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()

    return step


def graph_network(torch: Any) -> Step:
    geometric = importlib.import_module("torch_geometric.nn")
    nodes, edges = 20_000, 200_000
    links = torch.randint(nodes, (2, edges), device="cuda")
    features = torch.randn(nodes, 128, device="cuda")
    classes = torch.randint(40, (nodes,), device="cuda")
    layers = [geometric.GCNConv(128, 256), geometric.GATConv(256, 64, heads=4)]
    model = torch.nn.ModuleList([*layers, geometric.SAGEConv(256, 40)]).cuda()

    def loss_of(model: Any) -> Any:
        x = features
        for layer in model:
            x = torch.relu(layer(x, links))
        return torch.nn.functional.cross_entropy(x, classes)

    return training(torch, model, loss_of)


def graph_isomorphism(torch: Any) -> Step:
    """Classes of many small graphs in one batch."""
    geometric = importlib.import_module("torch_geometric.nn")
    graphs, nodes = 512, 40
    own = torch.arange(graphs, device="cuda").repeat_interleave(nodes)
    ring = torch.arange(graphs * nodes, device="cuda")
    links = torch.stack([ring.repeat(4), (ring.repeat(4) + ring.repeat(4) % 7) % len(ring)])
    features = torch.randn(graphs * nodes, 64, device="cuda")
    classes = torch.randint(10, (graphs,), device="cuda")
    model = geometric.GIN(64, 256, 5, norm="batch_norm", jk="cat", out_channels=256).cuda()
    head = perceptron(torch, 256, 256, 10).cuda()

    def loss_of(models: Any) -> Any:
        body, head = models
        summed = geometric.global_add_pool(body(features, links), own, size=graphs)
        return torch.nn.functional.cross_entropy(head(summed), classes)

    return training(torch, torch.nn.ModuleList([model, head]), loss_of, optimizer=torch.optim.Adam)


def molecules(torch: Any) -> Step:
    """Messages along bonds, whose weights the bonds' own features make; a recurrent cell keeps
    what an atom knows."""
    nn, geometric = torch.nn, importlib.import_module("torch_geometric.nn")
    graphs, atoms = 256, 18
    count = graphs * atoms
    own = torch.arange(graphs, device="cuda").repeat_interleave(atoms)
    start = torch.arange(count, device="cuda").repeat(2)
    links = torch.stack([start, start // atoms * atoms + (start + 1) % atoms])
    features = torch.randn(count, 32, device="cuda")
    bonds = torch.randn(2 * count, 8, device="cuda")
    energy = torch.randn(graphs, 1, device="cuda")
    parts = {
        "first": nn.Linear(32, 64),
        "messages": geometric.NNConv(64, 64, perceptron(torch, 8, 128, 64 * 64), aggr="mean"),
        "cell": nn.GRU(64, 64),
        "read": geometric.Set2Set(64, processing_steps=3),
        "head": perceptron(torch, 128, 64, 1),
    }

    def loss_of(model: Any) -> Any:
        x = torch.relu(model.first(features))
        state = x[None]
        for _ in range(3):
            message = torch.relu(model.messages(x, links, bonds))
            x, state = model.cell(message[None], state)
            x = x[0]
        return nn.functional.mse_loss(model.head(model.read(x, own)), energy)

    return training(torch, module(torch, loss_of, **parts), loss_of, lr=1e-3)


def factorises(torch: Any) -> Step:
    """Who likes what, from a row for each person and each thing; the gradients are sparse."""
    nn = torch.nn
    sizes = {"people": (400_000, 64), "things": (100_000, 64)}
    sizes |= {"habits": (400_000, 1), "fame": (100_000, 1)}
    parts = {name: nn.Embedding(*size, sparse=True) for name, size in sizes.items()}
    people = torch.randint(400_000, (65536,), device="cuda")
    things = torch.randint(100_000, (65536,), device="cuda")
    stars = torch.randint(1, 6, (65536,), device="cuda").float()

    def loss_of(model: Any) -> Any:
        alike = (model.people(people) * model.things(things)).sum(1, keepdim=True)
        said = alike + model.habits(people) + model.fame(things)
        return nn.functional.mse_loss(said.squeeze(1), stars)

    model = module(torch, loss_of, **parts)
    return training(torch, model, loss_of, optimizer=torch.optim.Adagrad, lr=0.05)


def deep_factorises(torch: Any) -> Step:
    """All pairs of a table's columns, and a tower beside them."""
    nn, columns = torch.nn, 26
    parts = {
        "embed": nn.Embedding(columns * 20_000, 32),
        "linear": nn.Embedding(columns * 20_000, 1),
        "tower": perceptron(torch, columns * 32 + 13, 400, 400, 1),
    }
    starts = torch.arange(columns, device="cuda") * 20_000
    table = torch.randint(20_000, (8192, columns), device="cuda") + starts
    numbers = torch.rand(8192, 13, device="cuda")
    clicks = torch.rand(8192, device="cuda").round()

    def loss_of(model: Any) -> Any:
        rows = model.embed(table)
        pairs = (rows.sum(1).square() - rows.square().sum(1)).sum(1) / 2
        deep = model.tower(torch.cat([rows.flatten(1), numbers.log1p()], 1)).squeeze(1)
        said = pairs + deep + model.linear(table).sum((1, 2))
        return nn.functional.binary_cross_entropy_with_logits(said, clicks)

    model = module(torch, loss_of, **parts)
    return training(torch, model, loss_of, optimizer=torch.optim.Adam, fused=True)


def table_transformer(torch: Any) -> Step:
    """Attention among the columns of a table, with a rate that goes up and down again."""
    nn, columns = torch.nn, 20
    rows = {"d_model": 64, "nhead": 8, "dim_feedforward": 256, "batch_first": True}
    parts = {
        "embed": nn.Embedding(columns * 100, 64),
        "body": nn.TransformerEncoder(nn.TransformerEncoderLayer(**rows, activation="gelu"), 4),
        "normal": nn.BatchNorm1d(10),
        "head": perceptron(torch, columns * 64 + 10, 512, 128, 2, activation=nn.SELU),
    }
    starts = torch.arange(columns, device="cuda") * 100
    table = torch.randint(100, (2048, columns), device="cuda") + starts
    numbers, answers = torch.randn(2048, 10, device="cuda"), torch.ones(2048, device="cuda")

    def loss_of(model: Any) -> Any:
        read = model.body(model.embed(table)).flatten(1)
        said = model.head(torch.cat([read, model.normal(numbers)], 1))
        return nn.functional.cross_entropy(said, answers.long())

    model = module(torch, loss_of, **parts)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=100)

    def step() -> None:
        descend(optimizer, loss_of(model))
        rate.step()

    return step
