"""Models of physics, and gradients of gradients."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from bench.programs._shared import Step, convolved, descend, module, perceptron, training


def ensemble(torch: Any) -> Step:
    """Sixteen small networks at once, mapped over their stacked weights."""
    nn, func = torch.nn, torch.func

    def one() -> Any:
        first = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(4096, 10)).cuda()

    models = [one() for _ in range(16)]
    weights, buffers = func.stack_module_state(models)
    bare = copy.deepcopy(models[0]).to("meta")
    optimizer = torch.optim.Adam(weights.values(), lr=1e-3)
    images = torch.rand(64, 3, 32, 32, device="cuda")
    classes = torch.randint(10, (64,), device="cuda")

    def loss_of(weights: Any, buffers: Any) -> Any:
        said = func.functional_call(bare, (weights, buffers), (images,))
        return nn.functional.cross_entropy(said, classes)

    return lambda: descend(optimizer, func.vmap(loss_of)(weights, buffers).sum())


def learns_to_learn(torch: Any) -> Step:
    """Each task takes three steps of its own from shared weights, which learn through them."""
    nn = torch.nn
    layers: list[Any] = []
    for before in (3, 32, 32, 32):
        layers += [convolved(torch, before, 32), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(800, 5)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tasks = torch.rand(4, 2, 25, 3, 84, 84, device="cuda")
    classes = torch.arange(25, device="cuda") % 5

    def loss_of(weights: Any, images: Any) -> Any:
        said = torch.func.functional_call(model, weights, (images,))
        return nn.functional.cross_entropy(said, classes)

    def step() -> None:
        for seen, asked in tasks:
            weights = dict(model.named_parameters())
            for _ in range(3):
                slopes = torch.autograd.grad(
                    loss_of(weights, seen), list(weights.values()), create_graph=True
                )
                pairs = zip(weights.items(), slopes, strict=True)
                weights = {name: weight - 0.01 * slope for (name, weight), slope in pairs}
            (loss_of(weights, asked) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def physics(torch: Any) -> Step:
    """A network that obeys Burgers' equation, whose second derivatives it is asked for. LBFGS."""
    nn = torch.nn
    model = perceptron(torch, 2, *[128] * 6, 1, activation=nn.Tanh).cuda()
    places = torch.rand(20_000, 2, device="cuda") * 2 - 1
    start = torch.rand(2000, 2, device="cuda") * torch.tensor([2.0, 0.0], device="cuda") - 1
    wanted = -(torch.pi * start[:, :1]).sin()
    search = {"max_iter": 8, "history_size": 20, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(model.parameters(), **search)

    def slopes(y: Any, x: Any) -> Any:
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    def closure() -> Any:
        optimizer.zero_grad()
        x = places.detach().requires_grad_()
        u = model(x)
        by_place, by_time = slopes(u, x).split(1, 1)
        twice = slopes(by_place, x)[:, :1]
        wrong = by_time + u * by_place - 0.01 / torch.pi * twice
        loss = wrong.square().mean() + nn.functional.mse_loss(model(start), wanted)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def flows(torch: Any) -> Step:
    """Images follow a differential equation, solved by Runge and Kutta's four stages."""
    nn = torch.nn
    conv = {"kernel_size": 3, "padding": 1}
    slope = nn.Sequential(
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.Conv2d(64, 64, **conv),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.Conv2d(64, 64, **conv),
    )
    parts = {
        "enter": nn.Conv2d(1, 64, 4, 2, 1),
        "slope": slope,
        "leave": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    }
    images = torch.rand(64, 1, 28, 28, device="cuda")
    digits = torch.randint(10, (64,), device="cuda")

    def forward(self: Any, images: Any) -> Any:
        x, h = self.enter(images), 1 / 6
        for _ in range(6):
            first = self.slope(x)
            second = self.slope(x + h / 2 * first)
            third = self.slope(x + h / 2 * second)
            last = self.slope(x + h * third)
            x = x + h / 6 * (first + 2 * second + 2 * third + last)
        return self.leave(x)

    loss = nn.functional.cross_entropy
    model = module(torch, forward, **parts)
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    return training(torch, model, lambda model: loss(model(images), digits), **sgd)


def fourier_operator(torch: Any) -> Step:
    """Complex weights for the lowest frequencies of a flow, beside convolutions one wide."""
    nn, width, kept = torch.nn, 48, 16

    def spectral_forward(self: Any, x: Any) -> Any:
        waves = torch.fft.rfft2(x)
        out = torch.zeros_like(waves)
        for weight, rows in zip(self.weights, (slice(kept), slice(-kept, None)), strict=True):
            low = waves[:, :, rows, :kept]
            out[:, :, rows, :kept] = torch.einsum("bixy,ioxy->boxy", low, weight)
        return torch.fft.irfft2(out, s=x.shape[-2:]) + self.straight(x)

    def spectral() -> Any:
        weights = (
            torch.randn(width, width, kept, kept, dtype=torch.cfloat) / width**2 for _ in range(2)
        )
        straight = nn.Conv2d(width, width, 1)
        return module(torch, spectral_forward, weights=nn.ParameterList(weights), straight=straight)

    layers: list[Any] = []
    for _ in range(4):
        layers += [spectral(), nn.GELU()]
    last = nn.Conv2d(width, 128, 1), nn.GELU(), nn.Conv2d(128, 1, 1)
    model = nn.Sequential(nn.Conv2d(12, width, 1), *layers[:-1], *last).cuda()
    before = torch.randn(16, 12, 96, 96, device="cuda")
    after = torch.randn(16, 1, 96, 96, device="cuda")

    def loss_of(model: Any) -> Any:
        apart = (model(before) - after).flatten(1).norm(dim=1)
        return (apart / after.flatten(1).norm(dim=1)).mean()

    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-3, weight_decay=1e-4)


def sine_network(torch: Any) -> Step:
    """An image as sines of sines of places, fitted to its slopes as well."""
    nn = torch.nn
    layers = [nn.Linear(2, 256), *(nn.Linear(256, 256) for _ in range(3))]
    for layer in layers[1:]:
        nn.init.uniform_(layer.weight, -((6 / 256) ** 0.5) / 30, (6 / 256) ** 0.5 / 30)
    model = nn.ModuleList([*layers, nn.Linear(256, 1)]).cuda()
    line = torch.linspace(-1, 1, 256, device="cuda")
    places = torch.stack(torch.meshgrid(line, line, indexing="ij"), 2).view(-1, 2)
    image = torch.rand(256 * 256, 1, device="cuda")
    slopes = torch.randn(256 * 256, 2, device="cuda")

    def loss_of(model: Any) -> Any:
        where = places.clone().requires_grad_(True)
        x = where
        for layer in model[:-1]:
            x = torch.sin(30 * layer(x))
        said = model[-1](x)
        ones = torch.ones_like(said)
        (slope,) = torch.autograd.grad(said, where, ones, create_graph=True)
        return nn.functional.mse_loss(said, image) + 0.1 * (slope - slopes).square().sum(1).mean()

    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-4)


def points(torch: Any) -> Step:
    """Classes of clouds of points, which are turned by a matrix that the network finds first; the
    greatest of each feature is what it keeps."""
    nn = torch.nn

    def shared(*widths: int) -> Any:
        layers: list[Any] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv1d(before, after, 1), nn.BatchNorm1d(after), nn.ReLU()]
        return nn.Sequential(*layers)

    def head(last: int) -> Any:
        first = nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU()
        second = nn.Linear(512, 256), nn.BatchNorm1d(256), nn.ReLU()
        return nn.Sequential(*first, *second, nn.Dropout(0.3), nn.Linear(256, last))

    def turns(width: int) -> Any:
        def forward(self: Any, x: Any) -> Any:
            matrix = self.head(self.convs(x).max(2)[0]).view(-1, width, width)
            return matrix + torch.eye(width, device=x.device)

        return module(torch, forward, convs=shared(width, 64, 128, 1024), head=head(width**2))

    parts = {
        "places": turns(3),
        "features": turns(64),
        "first": shared(3, 64, 64),
        "last": shared(64, 128, 1024),
        "head": head(40),
    }
    clouds = torch.randn(32, 1024, 3, device="cuda")
    classes = torch.randint(40, (32,), device="cuda")

    def forward(self: Any, clouds: Any) -> Any:
        x = torch.bmm(clouds, self.places(clouds.transpose(1, 2))).transpose(1, 2)
        x = self.first(x)
        matrix = self.features(x)
        x = torch.bmm(x.transpose(1, 2), matrix).transpose(1, 2)
        return self.head(self.last(x).max(2)[0]), matrix

    def loss_of(model: Any) -> Any:
        said, matrix = model(clouds)
        skew = torch.bmm(matrix, matrix.transpose(1, 2)) - torch.eye(64, device="cuda")
        return nn.functional.cross_entropy(said, classes) + 1e-3 * skew.norm(dim=(1, 2)).mean()

    model = module(torch, forward, **parts)
    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-3)
