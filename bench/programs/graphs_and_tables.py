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


def neighbours(torch: Any) -> Step:
    """Each node asks a few of its neighbours, drawn from a table, and they theirs."""
    nn, nodes = torch.nn, 100_000
    links = torch.randint(nodes, (nodes, 32), device="cuda")
    features = torch.randn(nodes, 256, device="cuda")
    classes = torch.randint(47, (nodes,), device="cuda")
    layers = [nn.Linear(512, 256), nn.Linear(512, 256)]
    model = nn.ModuleList([*layers, nn.Linear(256, 47)]).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def drawn(some: Any, count: int) -> Any:
        which = torch.randint(32, (len(some), count), device="cuda")
        return links[some].gather(1, which).flatten()

    def joined(layer: Any, own: Any, others: Any) -> Any:
        mean = others.view(len(own), -1, others.shape[1]).mean(1)
        return nn.functional.normalize(torch.relu(layer(torch.cat([own, mean], 1))), dim=1)

    def step() -> None:
        for some in torch.randperm(nodes, device="cuda")[:4096].split(1024):
            near = drawn(some, 10)
            far = drawn(near, 10)
            own, nearby, distant = features[some], features[near], features[far]
            x = joined(model[0], own, nearby)
            nearby = joined(model[0], nearby, distant)
            x = nn.functional.dropout(joined(model[1], x, nearby), 0.5)
            descend(optimizer, nn.functional.cross_entropy(model[2](x), classes[some]))

    return step


def two_towers(torch: Any) -> Step:
    """Who likes what: a tower for people and what they saw, one for things; the others of the
    batch are what they did not choose, corrected by how often they come."""
    nn, functional = torch.nn, torch.nn.functional
    parts = {
        "people": nn.Embedding(200_000, 64),
        "things": nn.Embedding(50_000, 64, padding_idx=0),
        "person": perceptron(torch, 128, 256, 128),
        "thing": perceptron(torch, 64, 256, 128),
    }
    people = torch.randint(200_000, (4096,), device="cuda")
    seen = torch.randint(50_000, (4096, 50), device="cuda")
    chosen = torch.randint(1, 50_000, (4096,), device="cuda")
    often = torch.rand(50_000, device="cuda").clamp(1e-6)

    def loss_of(model: Any) -> Any:
        known = (seen != 0).unsqueeze(2)
        mean = (model.things(seen) * known).sum(1) / known.sum(1).clamp(min=1)
        left = model.person(torch.cat([model.people(people), mean], 1))
        right = model.thing(model.things(chosen))
        alike = functional.normalize(left, dim=1) @ functional.normalize(right, dim=1).T / 0.05
        alike = alike - often[chosen].log()
        same = (chosen[:, None] == chosen) & ~torch.eye(4096, dtype=torch.bool, device="cuda")
        alike = alike.masked_fill(same, -1e9)
        return functional.cross_entropy(alike, torch.arange(4096, device="cuda"))

    model = module(torch, loss_of, **parts)
    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-3)


def large_batches(torch: Any) -> Step:
    """Rows by the ten thousands. Slow weights go half the way after every second update."""
    nn = torch.nn
    layers: list[Any] = []
    for before in (128, 512, 512, 512):
        layers += [nn.Linear(before, 512), nn.BatchNorm1d(512), nn.SiLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(512, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    slow = [weight.detach().clone() for weight in model.parameters()]
    table = torch.randn(262_144, 128, device="cuda")
    wanted = torch.randn(262_144, 1, device="cuda")

    def step() -> float:
        losses = []
        order = torch.randperm(len(table), device="cuda")
        for number, some in enumerate(order.split(32_768)):
            loss = nn.functional.huber_loss(model(table[some]), wanted[some])
            descend(optimizer, loss)
            losses.append(loss.detach())
            if number % 2:
                with torch.no_grad():
                    for kept, weight in zip(slow, model.parameters(), strict=True):
                        kept.add_(weight - kept, alpha=0.5)
                        weight.copy_(kept)
        return float(torch.stack(losses).mean())

    return step
