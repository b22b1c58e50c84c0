"""Models that say something of each place in an image or a volume: what it shows, what stands
there, and where its parts are.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

from bench.programs._shared import (
    Step,
    cast,
    configured,
    convolved,
    descend,
    module,
    perceptron,
    timm_model,
    training,
    vision_model,
)


def unet(torch: Any) -> Step:
    nn = torch.nn

    def block(before: int, after: int) -> Any:
        conv = nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()
        return nn.Sequential(*conv, nn.Conv2d(after, after, 3, padding=1), nn.ReLU())

    widths = 3, 32, 64, 128, 256
    parts = {
        "down": nn.ModuleList(map(block, widths, widths[1:])),
        "up": nn.ModuleList(block(a + b, a) for a, b in itertools.pairwise(widths[1:])),
        "last": nn.Conv2d(32, 1, 1),
    }

    def forward(self: Any, x: Any) -> Any:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = kept.pop()
        for up, skip in zip(reversed(self.up), reversed(kept), strict=True):
            x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
            x = up(torch.cat([x, skip], 1))
        return self.last(x)

    images = torch.randn(4, 3, 256, 256, device="cuda")
    masks = torch.rand(4, 1, 256, 256, device="cuda")
    loss = nn.functional.binary_cross_entropy_with_logits
    model = module(torch, forward, **parts)
    return training(torch, model, lambda model: loss(model(images), masks))


def _twice(torch: Any, before: int, after: int) -> Any:
    return torch.nn.Sequential(convolved(torch, before, after), convolved(torch, after, after))


def unet_nested(torch: Any) -> Step:
    """Each level joins all that it has found so far with what the level below found."""
    nn, widths = torch.nn, (32, 64, 128, 256)
    blocks = {}
    for level, width in enumerate(widths):
        blocks[f"{level}{0}"] = _twice(torch, (3, *widths)[level], width)
        for place in range(1, 4 - level):
            joined = width * place + widths[level + 1]
            blocks[f"{level}{place}"] = _twice(torch, joined, width)
    heads = nn.ModuleList(nn.Conv2d(32, 5, 1) for _ in range(3))

    def forward(self: Any, x: Any) -> Any:
        found: dict[tuple[int, int], Any] = {}
        for place in range(4):
            for level in range(4 - place):
                if place:
                    below = found[level + 1, place - 1]
                    below = nn.functional.interpolate(below, scale_factor=2, mode="nearest")
                    x = torch.cat([*(found[level, i] for i in range(place)), below], 1)
                elif level:
                    x = nn.functional.max_pool2d(found[level - 1, 0], 2)
                found[level, place] = self.blocks[f"{level}{place}"](x)
        return [head(found[0, 1 + i]) for i, head in enumerate(self.heads)]

    images = torch.randn(4, 3, 192, 192, device="cuda")
    shown = torch.randint(5, (4, 192, 192), device="cuda")

    def loss_of(model: Any) -> Any:
        return sum(nn.functional.cross_entropy(said, shown) for said in model(images))

    model = module(torch, forward, blocks=nn.ModuleDict(blocks), heads=heads)
    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-3)


def unet_attends(torch: Any) -> Step:
    """What a level passes on is weighted by what the level below asks for."""
    nn, widths = torch.nn, (48, 96, 192, 384)

    def gate(width: int) -> Any:
        joined = nn.Sequential(nn.Conv2d(2 * width, width // 2, 1), nn.ReLU(True))
        return nn.Sequential(joined, nn.Conv2d(width // 2, 1, 1), nn.Sigmoid())

    parts = {
        "down": nn.ModuleList(_twice(torch, a, b) for a, b in itertools.pairwise((1, *widths))),
        "grow": nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in widths[:-1]),
        "gates": nn.ModuleList(map(gate, widths[:-1])),
        "up": nn.ModuleList(_twice(torch, 2 * a, a) for a in widths[:-1]),
        "last": nn.Conv2d(widths[0], 3, 1),
    }

    def forward(self: Any, x: Any) -> Any:
        kept: list[Any] = []
        for down in self.down:
            kept.append(down(nn.functional.max_pool2d(kept[-1], 2) if kept else x))
        x = kept.pop()
        for grow, gate, up in reversed(list(zip(self.grow, self.gates, self.up, strict=True))):
            x, skip = grow(x), kept.pop()
            x = up(torch.cat([x, skip * gate(torch.cat([x, skip], 1))], 1))
        return self.last(x)

    scans = torch.randn(8, 1, 224, 224, device="cuda")
    shown = torch.randint(3, (8, 224, 224), device="cuda")
    model = module(torch, forward, **parts)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()

    def step() -> None:
        with torch.autocast("cuda", torch.float16):
            said = model(scans)
        one_hot = nn.functional.one_hot(shown, 3).permute(0, 3, 1, 2)
        likely = said.float().softmax(1)
        shared = 2 * (likely * one_hot).sum((2, 3)) / (likely + one_hot).sum((2, 3))
        descend(optimizer, 1 - shared.mean(), scaler)

    return step


def _segments(torch: Any, name: str, batch: int, size: int, **options: Any) -> Step:
    """Fine-tunes a model of torchvision; one that has a second head learns from it, too."""
    both = "lraspp" not in name
    extra = {"aux_loss": True} if both else {}
    model = vision_model(name, weights_backbone=None, num_classes=21, **extra).cuda()
    layout, dtype = options.pop("layout", torch.contiguous_format), options.pop("dtype", None)
    images = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=layout)
    shown = torch.randint(21, (batch, size, size), device="cuda")
    shown[:, :8] = 255
    model = model.to(memory_format=layout)

    def loss_of(model: Any) -> Any:
        said = model(images)
        loss = torch.nn.functional.cross_entropy(said["out"], shown, ignore_index=255)
        if both:
            aux = torch.nn.functional.cross_entropy(said["aux"], shown, ignore_index=255)
            loss = loss + 0.5 * aux
        return loss

    return training(torch, model, cast(torch, dtype, loss_of), **options)


def fcn(torch: Any) -> Step:
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.01, "momentum": 0.9}
    return _segments(torch, "fcn_resnet50", 4, 256, **sgd)


def deeplab(torch: Any) -> Step:
    options = {"dtype": torch.bfloat16, "layout": torch.channels_last}
    return _segments(torch, "deeplabv3_resnet50", 4, 320, **options)


def lraspp(torch: Any) -> Step:
    return _segments(torch, "lraspp_mobilenet_v3_large", 12, 320, optimizer=torch.optim.Adam)


def _detects(torch: Any, model: Any, batch: int, size: int, **options: Any) -> Step:
    """Fine-tunes a detector of torchvision, which chooses among its proposals by their values."""
    images = [torch.rand(3, size, size, device="cuda") for _ in range(batch)]
    corners = torch.arange(12, device="cuda")[:, None] * torch.tensor([18.0, 14.0], device="cuda")
    sides = torch.tensor([90.0, 70.0], device="cuda") + corners / 4
    boxes = torch.cat([corners, corners + sides], 1)
    things = torch.arange(1, 13, device="cuda")
    truth = [{"boxes": boxes, "labels": things} for _ in range(batch)]

    def loss_of(model: Any) -> Any:
        return sum(model(images, truth).values())

    sgd = {"optimizer": torch.optim.SGD, "lr": 0.005, "momentum": 0.9}
    return training(torch, model.cuda().train(), loss_of, **sgd, **options)


def faster_rcnn(torch: Any) -> Step:
    options = {"weights_backbone": None, "num_classes": 21, "min_size": 480, "max_size": 640}
    return _detects(torch, vision_model("fasterrcnn_resnet50_fpn", **options), 2, 480)


def retinanet(torch: Any) -> Step:
    options = {"weights_backbone": None, "num_classes": 21, "min_size": 416, "max_size": 640}
    return _detects(torch, vision_model("retinanet_resnet50_fpn", **options), 4, 416)


def ssdlite(torch: Any) -> Step:
    options = {"weights_backbone": None, "num_classes": 21}
    model = vision_model("ssdlite320_mobilenet_v3_large", **options)
    return _detects(torch, model, 16, 320, weight_decay=5e-4)


def yolo(torch: Any) -> Step:
    """A head without anchors on three levels: boxes, whether something is there, and what."""
    nn = torch.nn

    def block(before: int, after: int, size: int = 3, stride: int = 1) -> Any:
        conv = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(after, eps=1e-3), nn.SiLU(inplace=True))

    def split(width: int) -> Any:
        deep = nn.Sequential(*(block(width // 2, width // 2) for _ in range(4)))
        return nn.ModuleList([block(width, width, 1), deep, block(width, width, 1)])

    widths = 32, 64, 128, 256, 512
    parts = {
        "stem": block(3, 32, 3, 2),
        "shrink": nn.ModuleList(block(a, b, 3, 2) for a, b in itertools.pairwise(widths)),
        "split": nn.ModuleList(map(split, widths[1:])),
        "join": nn.ModuleList([block(256 + 128, 128), block(512 + 256, 256)]),
        "heads": nn.ModuleList(nn.Conv2d(width, 4 + 1 + 80, 1) for width in (128, 256, 512)),
    }

    def forward(self: Any, x: Any) -> Any:
        x, levels = self.stem(x), []
        for shrink, (first, deep, last) in zip(self.shrink, self.split, strict=True):
            left, right = first(shrink(x)).chunk(2, 1)
            x = last(torch.cat([left, right + deep(right)], 1))
            levels.append(x)
        levels = levels[1:]
        for i in (1, 0):
            below = nn.functional.interpolate(levels[i + 1], scale_factor=2)
            levels[i] = self.join[i](torch.cat([levels[i], below], 1))
        said = [head(x).flatten(2) for head, x in zip(self.heads, levels, strict=True)]
        return torch.cat(said, 2).mT

    images = torch.rand(8, 3, 416, 416, device="cuda")
    places = sum((416 // stride) ** 2 for stride in (8, 16, 32))
    there = (torch.arange(places, device="cuda") % 100 == 0).float().expand(8, -1)
    boxes = torch.rand(8, places, 4, device="cuda")
    things = torch.randint(80, (8, places), device="cuda")

    def loss_of(model: Any) -> Any:
        said, functional = model(images), nn.functional
        sure = functional.binary_cross_entropy_with_logits(said[..., 4], there)
        chosen = there.bool()
        where = functional.smooth_l1_loss(said[chosen][:, :4].sigmoid(), boxes[chosen])
        what = functional.cross_entropy(said[chosen][:, 5:], things[chosen])
        return sure + 5 * where + what

    return training(torch, module(torch, forward, **parts), cast(torch, torch.bfloat16, loss_of))


def _points(torch: Any, stages: int, channels: int) -> Any:
    """A ResNet, then transposed convolutions that bring it back to a quarter of the size."""
    nn = torch.nn
    layers = list(vision_model("resnet18").children())[:-2]
    before = 512
    for _ in range(stages):
        grow = nn.ConvTranspose2d(before, 256, 4, stride=2, padding=1, bias=False)
        layers += [grow, nn.BatchNorm2d(256), nn.ReLU(True)]
        before = 256
    return nn.Sequential(*layers, nn.Conv2d(256, channels, 1))


def centernet(torch: Any) -> Step:
    """Maps of where things have their centres, how large they are, and a focal loss."""
    model = _points(torch, 3, 80 + 4).cuda()
    images = torch.rand(12, 3, 384, 384, device="cuda")
    centres = torch.rand(12, 80, 96, 96, device="cuda") ** 8
    centres[:, :, ::24, ::24] = 1
    sizes = torch.rand(12, 4, 96, 96, device="cuda")

    def loss_of(model: Any) -> Any:
        heat, size = model(images).split([80, 4], 1)
        heat = heat.sigmoid().clamp(1e-4, 1 - 1e-4)
        there = centres.eq(1).float()
        found = heat.log() * (1 - heat) ** 2 * there
        missed = (1 - heat).log() * heat**2 * (1 - centres) ** 4 * (1 - there)
        wrong = (size - sizes).abs() * there.amax(1, keepdim=True)
        return (wrong.sum() * 0.1 - found.sum() - missed.sum()) / there.sum()

    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-4)


def poses(torch: Any) -> Step:
    """Maps of heat for 17 joints, from a network that keeps a high resolution throughout."""
    backbone = timm_model("hrnet_w18_small_v2", features_only=True, out_indices=(1,))
    head = torch.nn.Conv2d(backbone.feature_info.channels()[0], 17, 1)
    model = module(
        torch, lambda self, x: self.head(self.backbone(x)[0]), backbone=backbone, head=head
    )
    people = torch.randn(24, 3, 256, 192, device="cuda")
    seen = torch.rand(24, 17, 1, 1, device="cuda")
    heat = torch.rand(24, 17, 64, 48, device="cuda")

    def loss_of(model: Any) -> Any:
        return (seen * (model(people) - heat).square()).mean()

    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-3)


def detr(torch: Any) -> Step:
    """Queries ask a transformer for things, and are matched to the truth on the CPU."""
    nn = torch.nn
    match = importlib.import_module("scipy.optimize").linear_sum_assignment
    backbone = nn.Sequential(*list(vision_model("resnet50").children())[:-2])
    parts = {
        "backbone": backbone,
        "narrow": nn.Conv2d(2048, 256, 1),
        "body": nn.Transformer(256, 8, 3, 3, 1024, batch_first=True),
        "queries": nn.Embedding(50, 256),
        "places": nn.Embedding(144, 256),
        "what": nn.Linear(256, 21),
        "where": perceptron(torch, 256, 256, 256, 4),
    }

    def forward(self: Any, images: Any) -> Any:
        seen = self.narrow(self.backbone(images)).flatten(2).mT + self.places.weight
        found = self.body(seen, self.queries.weight.expand(len(images), -1, -1))
        return self.what(found), self.where(found).sigmoid()

    images = torch.randn(4, 3, 384, 384, device="cuda")
    boxes = torch.rand(4, 6, 4, device="cuda")
    things = torch.randint(20, (4, 6), device="cuda")

    def loss_of(model: Any) -> Any:
        what, where = model(images)
        truth = torch.full((4, 50), 20, device="cuda")
        apart = []
        for i in range(4):
            with torch.no_grad():
                likely = what[i].softmax(-1)[:, things[i]]
                costs = (torch.cdist(where[i], boxes[i], p=1) - likely).cpu()
            query, thing = (torch.as_tensor(found, device="cuda") for found in match(costs))
            truth[i, query] = things[i, thing]
            apart.append(nn.functional.l1_loss(where[i, query], boxes[i, thing]))
        return nn.functional.cross_entropy(what.mT, truth) + 5 * torch.stack(apart).mean()

    return training(torch, module(torch, forward, **parts), loss_of, lr=1e-4, weight_decay=1e-4)


def unet_3d(torch: Any) -> Step:
    """Volumes, each normalised by itself."""
    nn, widths = torch.nn, (24, 48, 96, 192)

    def block(before: int, after: int) -> Any:
        layers: list[Any] = []
        for channels in (before, after):
            conv = nn.Conv3d(channels, after, 3, padding=1)
            layers += [conv, nn.InstanceNorm3d(after, affine=True), nn.LeakyReLU(0.01, True)]
        return nn.Sequential(*layers)

    parts = {
        "down": nn.ModuleList(itertools.starmap(block, itertools.pairwise((1, *widths)))),
        "grow": nn.ModuleList(nn.ConvTranspose3d(2 * a, a, 2, stride=2) for a in widths[:-1]),
        "up": nn.ModuleList(block(2 * a, a) for a in widths[:-1]),
        "last": nn.Conv3d(widths[0], 4, 1),
    }

    def forward(self: Any, x: Any) -> Any:
        kept: list[Any] = []
        for down in self.down:
            kept.append(down(nn.functional.max_pool3d(kept[-1], 2) if kept else x))
        x = kept.pop()
        for grow, up in reversed(list(zip(self.grow, self.up, strict=True))):
            x = up(torch.cat([grow(x), kept.pop()], 1))
        return self.last(x)

    scans = torch.randn(2, 1, 64, 80, 80, device="cuda")
    organs = torch.randint(4, (2, 64, 80, 80), device="cuda")
    loss = nn.functional.cross_entropy
    model = module(torch, forward, **parts)
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.01, "momentum": 0.99, "nesterov": True}
    return training(torch, model, lambda model: loss(model(scans), organs), **sgd)


def unet_transposed(torch: Any) -> Step:
    """Grows by transposed convolutions; half precision, and a loss of overlaps."""
    nn, functional = torch.nn, torch.nn.functional
    widths = 64, 128, 256, 512, 1024

    def twice(before: int, after: int) -> Any:
        return nn.Sequential(convolved(torch, before, after), convolved(torch, after, after))

    pairs = list(itertools.pairwise(widths))
    parts = {
        "first": twice(3, 64),
        "down": nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), twice(a, b)) for a, b in pairs),
        "grow": nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs),
        "up": nn.ModuleList(twice(b, a) for a, b in pairs),
        "last": nn.Conv2d(64, 2, 1),
    }

    def forward(self: Any, x: Any) -> Any:
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(kept[-1]))
        x = kept.pop()
        for grow, up in zip(reversed(self.grow), reversed(self.up), strict=True):
            x = up(torch.cat([kept.pop(), grow(x)], 1))
        return self.last(x)

    model = module(torch, forward, **parts).to(memory_format=torch.channels_last)
    momentum = {"lr": 1e-5, "weight_decay": 1e-8, "momentum": 0.999, "foreach": True}
    optimizer = torch.optim.RMSprop(model.parameters(), **momentum)
    scaler = torch.amp.GradScaler("cuda")
    images = torch.rand(4, 3, 256, 256, device="cuda").to(memory_format=torch.channels_last)
    masks = torch.randint(2, (4, 256, 256), device="cuda")

    def step() -> float:
        with torch.autocast("cuda", torch.float16):
            said = model(images)
            loss = functional.cross_entropy(said, masks)
            shares = said.softmax(1).float()
            true = functional.one_hot(masks, 2).permute(0, 3, 1, 2).float()
            both = 2 * (shares * true).sum((1, 2, 3))
            every = shares.sum((1, 2, 3)) + true.sum((1, 2, 3))
            loss = loss + 1 - ((both + 1e-6) / (every + 1e-6)).mean()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return float(loss.item())

    return step


def segformer(torch: Any) -> Step:
    model = configured("Segformer", "ForSemanticSegmentation", num_labels=19)
    images = torch.randn(8, 3, 256, 256, device="cuda")
    labels = torch.randint(19, (8, 256, 256), device="cuda")

    def loss_of(model: Any) -> Any:
        return model(pixel_values=images, labels=labels).loss

    return training(torch, model, loss_of, lr=6e-5)
