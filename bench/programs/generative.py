"""Models that make images, or mend them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from bench.programs._shared import (
    Step,
    cast,
    convolved,
    descend,
    module,
    perceptron,
    training,
    vision_model,
)


def _critic(torch: Any, *widths: int, normalise: Any = None) -> Any:
    """Halves the size at each width, and says one number for each place that is left."""
    nn = torch.nn
    layers: list[Any] = []
    for before, after in itertools.pairwise(widths):
        conv = nn.Conv2d(before, after, 4, 2, 1, bias=normalise is None or not layers)
        normal = [normalise(after)] if normalise and layers else []
        layers += [conv, *normal, nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4))


def _painter(torch: Any, *widths: int) -> Any:
    """Makes four times four places of its input, and doubles the size at each width."""
    nn = torch.nn
    layers: list[Any] = [nn.ConvTranspose2d(widths[0], widths[1], 4, bias=False)]
    for before, after in itertools.pairwise(widths[1:]):
        grow = nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)
        layers += [nn.BatchNorm2d(before), nn.ReLU(True), grow]
    return nn.Sequential(*layers, nn.Tanh())


def dcgan(torch: Any) -> Step:
    nn = torch.nn
    painter = _painter(torch, 100, 512, 256, 128, 64, 3).cuda()
    critic = _critic(torch, 3, 64, 128, 256, 512, normalise=nn.BatchNorm2d).cuda()
    adam = {"lr": 2e-4, "betas": (0.5, 0.999)}
    paints, judges = (torch.optim.Adam(m.parameters(), **adam) for m in (painter, critic))
    images = torch.rand(128, 3, 64, 64, device="cuda") * 2 - 1
    noise = torch.empty(128, 100, 1, 1, device="cuda")
    real, fake = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda")
    loss = nn.functional.binary_cross_entropy_with_logits

    def step() -> None:
        painted = painter(noise.normal_())
        critic.zero_grad()
        loss(critic(images).flatten(), real).backward()
        loss(critic(painted.detach()).flatten(), fake).backward()
        judges.step()
        descend(paints, loss(critic(painted).flatten(), real))

    return step


def wgan_gp(torch: Any) -> Step:
    """The critic's gradient by its images is held to length one, thus differentiated twice."""
    painter = _painter(torch, 128, 512, 256, 128, 64, 3).cuda()
    critic = _critic(torch, 3, 64, 128, 256, 512).cuda()
    adam = {"lr": 1e-4, "betas": (0.0, 0.9)}
    paints, judges = (torch.optim.Adam(m.parameters(), **adam) for m in (painter, critic))
    images = torch.rand(64, 3, 64, 64, device="cuda") * 2 - 1

    def penalty(painted: Any) -> Any:
        share = torch.rand(64, 1, 1, 1, device="cuda")
        mixed = (share * images + (1 - share) * painted).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        return (slope.flatten(1).norm(dim=1) - 1).square().mean()

    def step() -> None:
        for _ in range(3):
            with torch.no_grad():
                painted = painter(torch.randn(64, 128, 1, 1, device="cuda"))
            apart = critic(painted).mean() - critic(images).mean()
            descend(judges, apart + 10 * penalty(painted))
        descend(paints, -critic(painter(torch.randn(64, 128, 1, 1, device="cuda"))).mean())
        judges.zero_grad()

    return step


def pix2pix(torch: Any) -> Step:
    """A U-Net turns one image into another; a critic judges patches of both."""
    nn, widths = torch.nn, (64, 128, 256, 512, 512, 512)

    def down(before: int, after: int) -> Any:
        conv = nn.Conv2d(before, after, 4, 2, 1, bias=False)
        return nn.Sequential(nn.LeakyReLU(0.2), conv, nn.InstanceNorm2d(after))

    def up(before: int, after: int) -> Any:
        grow = nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)
        return nn.Sequential(nn.ReLU(), grow, nn.InstanceNorm2d(after), nn.Dropout(0.5))

    pairs = list(itertools.pairwise(widths))
    parts = {
        "first": nn.Conv2d(3, 64, 4, 2, 1),
        "down": nn.ModuleList(itertools.starmap(down, pairs)),
        "up": nn.ModuleList(up(b if i == 4 else 2 * b, a) for i, (a, b) in enumerate(pairs)),
        "last": nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(128, 3, 4, 2, 1), nn.Tanh()),
    }

    def forward(self: Any, x: Any) -> Any:
        kept = [self.first(x)]
        for one in self.down:
            kept.append(one(kept[-1]))
        x = kept.pop()
        for one in reversed(self.up):
            x = torch.cat([one(x), kept.pop()], 1)
        return self.last(x)

    painter = module(torch, forward, **parts)
    critic = _critic(torch, 6, 64, 128, 256, normalise=nn.InstanceNorm2d).cuda()
    paints, judges = (torch.optim.Adam(m.parameters(), 2e-4) for m in (painter, critic))
    before, after = torch.rand(2, 8, 3, 256, 256, device="cuda") * 2 - 1

    def judged(image: Any, truth: float) -> Any:
        return (critic(torch.cat([before, image], 1)) - truth).square().mean()

    def step() -> None:
        painted = painter(before)
        descend(judges, (judged(after, 1.0) + judged(painted.detach(), 0.0)) / 2)
        critic.requires_grad_(False)
        descend(paints, judged(painted, 1.0) + 100 * nn.functional.l1_loss(painted, after))
        critic.requires_grad_(True)

    return step


def vae(torch: Any) -> Step:
    nn = torch.nn
    widths = 3, 32, 64, 128, 256
    shrink = [convolved(torch, a, b, stride=2) for a, b in itertools.pairwise(widths)]
    grow: list[Any] = []
    for after, before in reversed(list(itertools.pairwise(widths[1:]))):
        grow += [nn.Upsample(scale_factor=2), convolved(torch, before, after)]
    last = nn.Upsample(scale_factor=2), nn.Conv2d(32, 3, 3, padding=1), nn.Sigmoid()
    parts = {
        "encoder": nn.Sequential(*shrink, nn.Flatten(), nn.Linear(256 * 36, 256)),
        "decoder": nn.Sequential(
            nn.Linear(128, 256 * 36), nn.Unflatten(1, (256, 6, 6)), *grow, *last
        ),
    }
    images = torch.rand(128, 3, 96, 96, device="cuda")

    def loss_of(model: Any) -> Any:
        mean, spread = model.encoder(images).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (spread / 2).exp()
        error = nn.functional.binary_cross_entropy(model.decoder(drawn), images, reduction="sum")
        return (error - 0.5 * (1 + spread - mean.square() - spread.exp()).sum()) / 128

    return training(torch, module(torch, loss_of, **parts), loss_of, optimizer=torch.optim.Adamax)


def vq_vae(torch: Any) -> Step:
    """Each place is rounded to the nearest of 1024 codes; the gradient passes straight on."""
    nn = torch.nn

    def residual() -> Any:
        inner = nn.Sequential(nn.ReLU(), nn.Conv2d(128, 64, 3, padding=1), nn.ReLU())
        inner.append(nn.Conv2d(64, 128, 1))
        return module(torch, lambda self, x: x + self.inner(x), inner=inner)

    shrink = nn.Conv2d(3, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 4, 2, 1)
    grow = nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1)
    parts = {
        "encoder": nn.Sequential(*shrink, residual(), residual(), nn.Conv2d(128, 64, 1)),
        "codes": nn.Embedding(1024, 64),
        "decoder": nn.Sequential(nn.Conv2d(64, 128, 1), residual(), residual(), *grow),
    }
    images = torch.rand(32, 3, 128, 128, device="cuda")

    def loss_of(model: Any) -> Any:
        read = model.encoder(images).permute(0, 2, 3, 1)
        nearest = torch.cdist(read.flatten(0, 2), model.codes.weight).argmin(1)
        codes = model.codes(nearest).view_as(read)
        apart = (codes - read.detach()).square().mean()
        bound = 0.25 * (codes.detach() - read).square().mean()
        passed = (read + (codes - read).detach()).permute(0, 3, 1, 2)
        return nn.functional.mse_loss(model.decoder(passed), images) + apart + bound

    model = module(torch, loss_of, **parts)
    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=2e-4)


def _denoiser(torch: Any, channels: int, widths: tuple[int, ...], context: int = 0) -> Any:
    """A U-Net that is told the time, attends on its lowest level, and reads a context if any."""
    nn = torch.nn

    def residual_forward(self: Any, x: Any, time: Any) -> Any:
        y = self.first(x) + self.time(time)[..., None, None]
        return self.second(y) + self.skip(x)

    def residual(before: int, after: int) -> Any:
        def conv(width: int) -> Any:
            normal = nn.GroupNorm(16, width), nn.SiLU()
            return nn.Sequential(*normal, nn.Conv2d(width, after, 3, padding=1))

        skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        parts = {"first": conv(before), "second": conv(after), "skip": skip}
        return module(torch, residual_forward, time=nn.Linear(256, after), **parts)

    def attend_forward(self: Any, x: Any, context: Any) -> Any:
        rows = self.normal(x).flatten(2).mT
        x = x + self.own(rows, rows, rows, need_weights=False)[0].mT.unflatten(2, x.shape[2:])
        if context is None:
            return x
        rows = x.flatten(2).mT
        read = self.read(rows, context, context, need_weights=False)[0]
        return (rows + read).mT.unflatten(2, x.shape[2:])

    low = widths[-1]
    parts = {
        "normal": nn.GroupNorm(16, low),
        "own": nn.MultiheadAttention(low, 4, batch_first=True),
    }
    if context:
        wide = {"kdim": context, "vdim": context, "batch_first": True}
        parts["read"] = nn.MultiheadAttention(low, 4, **wide)
    pairs = list(itertools.pairwise(widths))
    body = {
        "time": nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 256)),
        "enter": nn.Conv2d(channels, widths[0], 3, padding=1),
        "down": nn.ModuleList(residual(a, a) for a, _ in pairs),
        "shrink": nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs),
        "before": residual(low, low),
        "attend": module(torch, attend_forward, **parts),
        "after": residual(low, low),
        "grow": nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in pairs),
        "up": nn.ModuleList(residual(2 * a, a) for a, _ in pairs),
        "leave": nn.Sequential(nn.GroupNorm(16, widths[0]), nn.SiLU()),
        "last": nn.Conv2d(widths[0], channels, 3, padding=1),
    }

    def forward(self: Any, x: Any, times: Any, context: Any = None) -> Any:
        turns = times[:, None] * torch.logspace(0, -4, 64, device="cuda")
        time = self.time(torch.cat([turns.sin(), turns.cos()], 1))
        x, kept = self.enter(x), []
        for down, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(down(x, time))
            x = shrink(kept[-1])
        x = self.after(self.attend(self.before(x, time), context), time)
        for grow, up in reversed(list(zip(self.grow, self.up, strict=True))):
            x = grow(nn.functional.interpolate(x, scale_factor=2))
            x = up(torch.cat([x, kept.pop()], 1), time)
        return self.last(self.leave(x))

    return module(torch, forward, **body)


def _noised(torch: Any, images: Any) -> tuple[Any, Any, Any]:
    """Images with some noise, that noise, and how far each was gone."""
    times = torch.randint(1000, (len(images),), device="cuda")
    left = (1 - (times / 1000)[:, None, None, None]).cos()
    noise = torch.randn_like(images)
    return left * images + (1 - left.square()).sqrt() * noise, noise, times


def diffusion(torch: Any) -> Step:
    """Learns the noise in images, and keeps a mean of its weights."""
    model = _denoiser(torch, 3, (64, 128, 192, 256))
    averaging = torch.optim.swa_utils
    mean = averaging.AveragedModel(model, multi_avg_fn=averaging.get_ema_multi_avg_fn(0.9999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    images = torch.rand(16, 3, 64, 64, device="cuda") * 2 - 1

    def step() -> None:
        noised, noise, times = _noised(torch, images)
        descend(optimizer, torch.nn.functional.mse_loss(model(noised, times), noise))
        mean.update_parameters(model)

    return step


def latent_diffusion(torch: Any) -> Step:
    """Noise in what a frozen encoder made of images; texts say what they show."""
    nn = torch.nn
    encoder = nn.Sequential(*(convolved(torch, a, b, stride=2) for a, b in ((3, 64), (64, 128))))
    encoder = encoder.append(nn.Conv2d(128, 4, 4, 2, 1)).cuda().to(torch.bfloat16).eval()
    images = torch.rand(16, 3, 256, 256, device="cuda", dtype=torch.bfloat16)
    texts = torch.randn(16, 77, 512, device="cuda")

    def loss_of(model: Any) -> Any:
        with torch.no_grad():
            latents = encoder(images).float() * 0.18
        noised, noise, times = _noised(torch, latents)
        return nn.functional.mse_loss(model(noised, times, texts).float(), noise)

    model = _denoiser(torch, 4, (128, 256, 384), context=512)
    return training(torch, model, cast(torch, torch.bfloat16, loss_of), fused=True, lr=1e-4)


def _enlarger(torch: Any, width: int, blocks: int, block: Any, factor: int) -> Any:
    """Convolutions at the small size, each adding to what went in, then pixels are shuffled."""
    nn = torch.nn
    parts = {
        "first": nn.Conv2d(3, width, 3, padding=1),
        "body": nn.Sequential(*(block() for _ in range(blocks))),
        "last": nn.Sequential(
            nn.Conv2d(width, width * factor**2, 3, padding=1),
            nn.PixelShuffle(factor),
            nn.Conv2d(width, 3, 3, padding=1),
        ),
    }

    def forward(self: Any, x: Any) -> Any:
        x = self.first(x)
        return self.last(x + self.body(x))

    return module(torch, forward, **parts)


def super_resolution(torch: Any) -> Step:
    """Residual blocks without normalisation."""
    nn = torch.nn

    def block() -> Any:
        conv = nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(True), nn.Conv2d(64, 64, 3, padding=1)
        return module(torch, lambda self, x: x + self.inner(x), inner=nn.Sequential(*conv))

    model = _enlarger(torch, 64, 16, block, 2)
    small = torch.rand(16, 3, 48, 48, device="cuda")
    large = torch.rand(16, 3, 96, 96, device="cuda")
    loss = nn.functional.l1_loss
    adam = {"optimizer": torch.optim.Adam, "lr": 1e-4, "amsgrad": True}
    return training(torch, model, lambda model: loss(model(small), large), **adam)


def super_resolution_gan(torch: Any) -> Step:
    """Dense residual blocks, and a critic that compares the painted with the real."""
    nn = torch.nn

    def dense_forward(self: Any, x: Any) -> Any:
        found = [x]
        for conv in self.convs[:-1]:
            found.append(nn.functional.leaky_relu(conv(torch.cat(found, 1)), 0.2))
        return x + 0.2 * self.convs[-1](torch.cat(found, 1))

    def dense() -> Any:
        convs = [nn.Conv2d(64 + 32 * i, 32 if i < 4 else 64, 3, padding=1) for i in range(5)]
        return module(torch, dense_forward, convs=nn.ModuleList(convs))

    painter = _enlarger(torch, 64, 6, dense, 4)
    critic = _critic(torch, 3, 64, 128, 256, 256, normalise=nn.BatchNorm2d).cuda()
    paints, judges = (torch.optim.Adam(m.parameters(), 1e-4) for m in (painter, critic))
    small = torch.rand(8, 3, 32, 32, device="cuda")
    large = torch.rand(8, 3, 128, 128, device="cuda")

    def judged(better: Any, worse: Any) -> Any:
        return nn.functional.softplus(critic(worse).mean() - critic(better)).mean()

    def step() -> None:
        painted = painter(small)
        alike = nn.functional.l1_loss(painted, large)
        descend(paints, alike + 5e-3 * judged(painted, large))
        judges.zero_grad()
        descend(judges, judged(large, painted.detach()))

    return step


def denoises(torch: Any) -> Step:
    """Seventeen convolutions find the noise."""
    nn = torch.nn
    inner = [convolved(torch, 64, 64) for _ in range(15)]
    first = nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(True))
    model = nn.Sequential(first, *inner, nn.Conv2d(64, 1, 3, padding=1)).cuda()
    images = torch.rand(64, 1, 64, 64, device="cuda")

    def loss_of(model: Any) -> Any:
        noise = torch.randn_like(images) * 0.1
        return nn.functional.mse_loss(model(images + noise), noise)

    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-3)


def style(torch: Any) -> Step:
    """The image itself is what learns, by LBFGS, from the layers of a frozen network."""
    layers = vision_model("vgg19").features[:21].cuda().eval().requires_grad_(False)
    content, pattern = torch.rand(2, 1, 3, 320, 320, device="cuda")
    image = content.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([image], max_iter=5, history_size=10)

    def features(x: Any) -> list[Any]:
        found = []
        for i, layer in enumerate(layers):
            x = torch.relu(x) if type(layer) is torch.nn.ReLU else layer(x)
            if i in (0, 5, 10, 19):
                found.append(x)
        return found

    def gram(x: Any) -> Any:
        rows = x.flatten(2)
        return rows @ rows.mT / rows.numel()

    with torch.no_grad():
        shown = features(content)[-1]
        grams = [gram(x) for x in features(pattern)]

    def closure() -> Any:
        optimizer.zero_grad()
        found = features(image)
        styles = [(gram(x) - wanted).square().sum() for x, wanted in zip(found, grams, strict=True)]
        loss = 1e5 * sum(styles) + torch.nn.functional.mse_loss(found[-1], shown)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def radiance_field(torch: Any) -> Step:
    """Colours along rays through a scene, from a network that is given each place as waves."""
    waves = 2.0 ** torch.arange(10, device="cuda")
    body = perceptron(torch, 60, 256, 256, 256, 256, 256)
    model = module(
        torch,
        lambda self, x: self.head(torch.relu(self.body(x))),
        body=body,
        head=torch.nn.Linear(256, 4),
    )
    starts = torch.rand(1024, 1, 3, device="cuda")
    ways = torch.nn.functional.normalize(torch.randn(1024, 1, 3, device="cuda"), dim=-1)
    seen = torch.rand(1024, 3, device="cuda")

    def loss_of(model: Any) -> Any:
        far = (torch.arange(128, device="cuda") + torch.rand(1024, 128, device="cuda")) / 32
        turns = ((starts + ways * far[..., None])[..., None] * waves).flatten(2)
        said = model(torch.cat([turns.sin(), turns.cos()], -1))
        colours, dense = said[..., :3].sigmoid(), torch.relu(said[..., 3])
        stopped = 1 - torch.exp(-dense / 32)
        passed = torch.cumprod(1 - stopped + 1e-10, 1).roll(1, 1)
        passed = torch.cat([torch.ones_like(passed[:, :1]), passed[:, 1:]], 1)
        return ((passed * stopped)[..., None] * colours).sum(1).sub(seen).square().mean()

    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=5e-4)


def small_diffusion(torch: Any) -> Step:
    """Images of 32 by 32, told how noisy they are; the mean of the weights so far draws some."""
    nn, functional = torch.nn, torch.nn.functional

    def mends(self: Any, x: Any, time: Any) -> Any:
        y = self.first(functional.silu(self.before(x))) + self.time(time)[:, :, None, None]
        return self.short(x) + self.second(self.drop(functional.silu(self.after(y))))

    def block(before: int, after: int) -> Any:
        convs = {"first": nn.Conv2d(before, after, 3, padding=1)}
        convs |= {"second": nn.Conv2d(after, after, 3, padding=1)}
        convs |= {"short": nn.Conv2d(before, after, 1) if before != after else nn.Identity()}
        parts = {"before": nn.GroupNorm(32, before), "after": nn.GroupNorm(32, after)}
        parts |= {"time": nn.Linear(256, after), "drop": nn.Dropout(0.1)}
        return module(torch, mends, **convs, **parts)

    def attends(self: Any, x: Any) -> Any:
        batch, width, high, wide = x.shape
        q, k, v = self.qkv(self.normal(x)).flatten(2).chunk(3, 1)
        scores = torch.bmm(q.transpose(1, 2), k) * width**-0.5
        seen = torch.bmm(v, scores.softmax(-1).transpose(1, 2))
        return x + self.last(seen.view(batch, width, high, wide))

    looks = {"normal": nn.GroupNorm(32, 256), "qkv": nn.Conv2d(256, 768, 1)}
    parts = {
        "time": perceptron(torch, 64, 256, 256, activation=nn.SiLU),
        "first": nn.Conv2d(3, 64, 3, padding=1),
        "down": nn.ModuleList([block(64, 64), block(64, 128), block(128, 256)]),
        "middle": nn.ModuleList([block(256, 256), block(256, 256)]),
        "looks": module(torch, attends, last=nn.Conv2d(256, 256, 1), **looks),
        "up": nn.ModuleList([block(512, 128), block(256, 64), block(128, 64)]),
        "last": nn.Sequential(nn.GroupNorm(32, 64), nn.SiLU(), nn.Conv2d(64, 3, 3, padding=1)),
    }
    rates = 10000 ** (-torch.arange(32, device="cuda") / 32)

    def forward(self: Any, x: Any, when: Any) -> Any:
        turns = when[:, None].float() * rates
        time = functional.silu(self.time(torch.cat([turns.sin(), turns.cos()], 1)))
        x, kept = self.first(x), []
        for down in self.down:
            x = down(x, time)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle[1](self.looks(self.middle[0](x, time)), time)
        for up in self.up:
            x = functional.interpolate(x, scale_factor=2, mode="nearest")
            x = up(torch.cat([x, kept.pop()], 1), time)
        return self.last(x)

    model = module(torch, forward, **parts)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    images = torch.rand(128, 3, 32, 32, device="cuda") * 2 - 1
    betas = torch.linspace(1e-4, 0.02, 1000, device="cuda")
    left = (1 - betas).cumprod(0)

    def draws() -> Any:
        x = torch.randn(16, 3, 32, 32, device="cuda")
        for when in range(999, 0, -200):
            noise = average(x, torch.full((16,), when, device="cuda"))
            x = (x - betas[when] / (1 - left[when]).sqrt() * noise) / (1 - betas[when]).sqrt()
            x = x + betas[when].sqrt() * torch.randn_like(x)
        return x.clamp(-1, 1).cpu()

    def step() -> object:
        when = torch.randint(1000, (128,), device="cuda")
        noise, share = torch.randn_like(images), left[when].view(-1, 1, 1, 1)
        noised = share.sqrt() * images + (1 - share).sqrt() * noise
        loss = functional.mse_loss(model(noised, when), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for slow, weight in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9999).add_(weight, alpha=0.0001)
            return draws()

    return step


def cycles(torch: Any) -> Step:
    """Two painters turn images of one kind into the other, and back into what they were."""
    nn, functional = torch.nn, torch.nn.functional

    def residual() -> Any:
        def half() -> tuple[Any, ...]:
            return nn.ReflectionPad2d(1), nn.Conv2d(256, 256, 3), nn.InstanceNorm2d(256)

        body = nn.Sequential(*half(), nn.ReLU(True), *half())
        return module(torch, lambda self, x: x + self.body(x), body=body)

    def painter() -> Any:
        def normal(width: int) -> tuple[Any, ...]:
            return nn.InstanceNorm2d(width), nn.ReLU(True)

        grow = {"stride": 2, "padding": 1, "output_padding": 1}
        return nn.Sequential(
            *(nn.ReflectionPad2d(3), nn.Conv2d(3, 64, 7), *normal(64)),
            *(nn.Conv2d(64, 128, 3, 2, 1), *normal(128)),
            *(nn.Conv2d(128, 256, 3, 2, 1), *normal(256)),
            *(residual() for _ in range(6)),
            *(nn.ConvTranspose2d(256, 128, 3, **grow), *normal(128)),
            *(nn.ConvTranspose2d(128, 64, 3, **grow), *normal(64)),
            *(nn.ReflectionPad2d(3), nn.Conv2d(64, 3, 7), nn.Tanh()),
        )

    there, back = (painter().cuda() for _ in range(2))
    critics = [_critic(torch, 3, 64, 128, 256, normalise=nn.InstanceNorm2d).cuda() for _ in "ab"]
    adam = {"lr": 2e-4, "betas": (0.5, 0.999)}
    paints = torch.optim.Adam([*there.parameters(), *back.parameters()], **adam)
    judges = torch.optim.Adam([w for critic in critics for w in critic.parameters()], **adam)
    photos, paintings = torch.rand(2, 2, 3, 128, 128, device="cuda") * 2 - 1

    def judged(critic: Any, images: Any, truth: float) -> Any:
        said = critic(images)
        return functional.mse_loss(said, torch.full_like(said, truth))

    def step() -> None:
        for critic in critics:
            critic.requires_grad_(False)
        painted, pictured = there(photos), back(paintings)
        loss = judged(critics[0], painted, 1.0) + judged(critics[1], pictured, 1.0)
        loss = loss + 10 * functional.l1_loss(back(painted), photos)
        loss = loss + 10 * functional.l1_loss(there(pictured), paintings)
        loss = loss + 5 * functional.l1_loss(there(paintings), paintings)
        loss = loss + 5 * functional.l1_loss(back(photos), photos)
        descend(paints, loss)
        pairs = (paintings, painted), (photos, pictured)
        for critic, (real, fake) in zip(critics, pairs, strict=True):
            critic.requires_grad_(True)
            wrong = judged(critic, real, 1.0) + judged(critic, fake.detach(), 0.0)
            (wrong * 0.5).backward()
        judges.step()
        judges.zero_grad()

    return step


def styled(torch: Any) -> Step:
    """A style scales the weights of each convolution, which thus differ from image to image."""
    nn, functional = torch.nn, torch.nn.functional

    def paints(self: Any, x: Any, style: Any) -> Any:
        batch, before, high, wide = x.shape
        weight = self.weight * (self.style(style) + 1).view(batch, 1, before, 1, 1)
        weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        x = x.reshape(1, batch * before, high, wide)
        x = functional.conv2d(x, weight.flatten(0, 1), padding=1, groups=batch)
        x = x.view(batch, -1, high, wide)
        noise = torch.randn(batch, 1, high, wide, device=x.device)
        return functional.leaky_relu(x + self.noise * noise + self.bias, 0.2)

    def layer(before: int, after: int) -> Any:
        weight = nn.Parameter(torch.randn(1, after, before, 3, 3) / (9 * before) ** 0.5)
        parts = {"bias": nn.Parameter(torch.zeros(1, after, 1, 1))}
        parts |= {"noise": nn.Parameter(torch.zeros(1)), "style": nn.Linear(256, before)}
        return module(torch, paints, weight=weight, **parts)

    widths = 256, 256, 256, 128, 64
    parts = {
        "maps": perceptron(torch, *[256] * 5, activation=lambda: nn.LeakyReLU(0.2)),
        "start": nn.Parameter(torch.randn(1, 256, 4, 4)),
        "layers": nn.ModuleList(
            nn.ModuleList([layer(a, b), layer(b, b)]) for a, b in itertools.pairwise(widths)
        ),
        "colours": nn.ModuleList(nn.Conv2d(width, 3, 1) for width in widths[1:]),
    }

    def forward(self: Any, drawn: Any) -> Any:
        style = self.maps(drawn * (drawn.square().mean(1, keepdim=True) + 1e-8).rsqrt())
        x, image = self.start.expand(len(drawn), -1, -1, -1), None
        for (first, second), colours in zip(self.layers, self.colours, strict=True):
            larger = {"scale_factor": 2, "mode": "bilinear", "align_corners": False}
            x = functional.interpolate(x, **larger)
            x = second(first(x, style), style)
            colour = colours(x)
            image = colour if image is None else functional.interpolate(image, **larger) + colour
        return image

    painter = module(torch, forward, **parts)
    critic = _critic(torch, 3, 64, 128, 256, 256).cuda()
    adam = {"lr": 2e-3, "betas": (0.0, 0.99)}
    draws, judges = (torch.optim.Adam(m.parameters(), **adam) for m in (painter, critic))
    images = torch.rand(32, 3, 64, 64, device="cuda") * 2 - 1

    def step() -> None:
        with torch.no_grad():
            painted = painter(torch.randn(32, 256, device="cuda"))
        real = images.detach().requires_grad_()
        said = critic(real)
        (slope,) = torch.autograd.grad(said.sum(), real, create_graph=True)
        loss = functional.softplus(critic(painted)).mean() + functional.softplus(-said).mean()
        descend(judges, loss + 5 * slope.square().sum((1, 2, 3)).mean())
        painted = painter(torch.randn(32, 256, device="cuda"))
        descend(draws, functional.softplus(-critic(painted)).mean())
        judges.zero_grad()

    return step


def digits(torch: Any) -> Step:
    """Squeezes digits of 28 by 28 into 32 numbers, and mends the noise in them."""
    nn = torch.nn
    shrink = nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()
    grow = {"stride": 2, "padding": 1, "output_padding": 1}
    model = nn.Sequential(
        *(*shrink, nn.Conv2d(64, 128, 7), nn.ReLU(), nn.Flatten(), nn.Linear(128, 32)),
        *(nn.Linear(32, 128), nn.Unflatten(1, (128, 1, 1))),
        *(nn.ConvTranspose2d(128, 64, 7), nn.ReLU()),
        *(nn.ConvTranspose2d(64, 32, 3, **grow), nn.ReLU()),
        *(nn.ConvTranspose2d(32, 1, 3, **grow), nn.Sigmoid()),
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    images = torch.rand(8 * 512, 1, 28, 28)

    def step() -> float:
        total = 0.0
        for some in images.split(512):
            clean = some.to("cuda")
            noisy = (clean + 0.3 * torch.randn_like(clean)).clamp(0.0, 1.0)
            loss = nn.functional.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(some)
        return total / len(images)

    return step
