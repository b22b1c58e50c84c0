"""Models that say what is in an image or a film."""

from __future__ import annotations

import importlib
from typing import Any

from bench.programs._shared import (
    Step,
    cast,
    classifier,
    convolved,
    labelled,
    module,
    timm_model,
    training,
    vision_model,
)


def resnet50(torch: Any) -> Step:
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    return classifier(torch, vision_model("resnet50"), 32, 224, **sgd)


def convnext_channels_last(torch: Any) -> Step:
    options = {"dtype": torch.bfloat16, "layout": torch.channels_last, "fused": True}
    return classifier(torch, vision_model("convnext_tiny"), 16, 224, **options)


def vit(torch: Any) -> Step:
    model = timm_model("vit_small_patch16_224", num_classes=1000)
    return classifier(torch, model, 32, 224, dtype=torch.bfloat16)


def swin(torch: Any) -> Step:
    return classifier(torch, vision_model("swin_t"), 8, 224)


def evaluates(torch: Any) -> Step:
    model = vision_model("efficientnet_b0").cuda().eval()
    images = torch.randn(64, 3, 224, 224, device="cuda")

    def step() -> object:
        with torch.inference_mode():
            return model(images).argmax(1).cpu()

    return step


def resnet18_scaled(torch: Any) -> Step:
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    half = {"dtype": torch.float16, "scaler": torch.amp.GradScaler()}
    return classifier(
        torch, vision_model("resnet18"), 128, 224, layout=torch.channels_last, **half, **sgd
    )


def regnet(torch: Any) -> Step:
    return classifier(torch, vision_model("regnet_y_1_6gf"), 32, 224, foreach=True)


def mobilenet(torch: Any) -> Step:
    rmsprop = {"optimizer": torch.optim.RMSprop, "lr": 0.01, "momentum": 0.9}
    return classifier(torch, vision_model("mobilenet_v3_large"), 64, 224, **rmsprop)


def efficientnet(torch: Any) -> Step:
    options = {"dtype": torch.bfloat16, "layout": torch.channels_last}
    return classifier(torch, vision_model("efficientnet_v2_s"), 24, 256, **options)


def densenet(torch: Any) -> Step:
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "nesterov": True}
    return classifier(torch, vision_model("densenet121"), 24, 224, **sgd)


def vgg_frozen(torch: Any) -> Step:
    """Only the last layers learn."""
    model = vision_model("vgg16")
    model.features.requires_grad_(False)
    return classifier(torch, model, 32, 224, optimizer=torch.optim.Adam, lr=1e-4)


def mnasnet_averaged(torch: Any) -> Step:
    """The mean of the weights over the steps is kept beside them."""
    model = vision_model("mnasnet1_0").cuda()
    averaging = torch.optim.swa_utils
    mean = averaging.get_ema_multi_avg_fn(0.999)
    averaged = averaging.AveragedModel(model, multi_avg_fn=mean, use_buffers=True)
    train = classifier(torch, model, 48, 224, optimizer=torch.optim.RMSprop, lr=0.01)

    def step() -> None:
        train()
        averaged.update_parameters(model)

    return step


def shufflenet(torch: Any) -> Step:
    return classifier(
        torch, vision_model("shufflenet_v2_x1_0"), 128, 224, optimizer=torch.optim.NAdam
    )


def inception(torch: Any) -> Step:
    """Its second head, half way up, learns, too."""
    model = vision_model("inception_v3", init_weights=False).cuda()
    images, classes = labelled(torch, 24, 299)
    loss = torch.nn.functional.cross_entropy

    def loss_of(model: Any) -> Any:
        last, halfway = model(images)
        return loss(last, classes, label_smoothing=0.1) + 0.4 * loss(halfway, classes)

    return training(torch, model, loss_of, optimizer=torch.optim.SGD, lr=0.05, momentum=0.9)


def resnext_accumulates(torch: Any) -> Step:
    """Grouped convolutions, and four micro-batches a step."""
    model = vision_model("resnext50_32x4d").cuda()
    images, classes = labelled(torch, 64, 224)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

    def step() -> None:
        for some, named in zip(images.chunk(4), classes.chunk(4), strict=True):
            loss = torch.nn.functional.cross_entropy(model(some), named)
            (loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def distils(torch: Any) -> Step:
    """A wide network teaches a narrow one what it says of each image."""
    teacher = vision_model("wide_resnet50_2").cuda().half().eval()
    student = vision_model("resnet18").cuda()
    images, classes = labelled(torch, 64, 224)
    functional = torch.nn.functional

    def loss_of(student: Any) -> Any:
        with torch.no_grad():
            said = (teacher(images.half()).float() / 4).softmax(1)
        own = student(images)
        apart = functional.kl_div((own / 4).log_softmax(1), said, reduction="batchmean")
        return 0.1 * functional.cross_entropy(own, classes) + 0.9 * 16 * apart

    return training(torch, student, loss_of, optimizer=torch.optim.SGD, lr=0.05, momentum=0.9)


def convnext_v2(torch: Any) -> Step:
    return classifier(torch, timm_model("convnextv2_nano"), 32, 224, dtype=torch.bfloat16)


def nfnet(torch: Any) -> Step:
    """No normalisation: the gradients are clipped by the norms of the weights."""
    utils = importlib.import_module("timm.utils")
    model = timm_model("eca_nfnet_l0").cuda()
    images, classes = labelled(torch, 24, 224)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def step() -> None:
        torch.nn.functional.cross_entropy(model(images), classes).backward()
        utils.adaptive_clip_grad(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()

    return step


def resnet_v2(torch: Any) -> Step:
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.003, "momentum": 0.9}
    model = timm_model("resnetv2_50x1_bit", num_classes=1000)
    return classifier(torch, model, 16, 256, **sgd)


def maxvit(torch: Any) -> Step:
    options = {"dtype": torch.bfloat16, "layout": torch.channels_last}
    return classifier(torch, timm_model("maxvit_tiny_tf_224"), 16, 224, **options)


def mobilevit(torch: Any) -> Step:
    return classifier(torch, timm_model("mobilevit_s"), 24, 256)


def coatnet(torch: Any) -> Step:
    half = {"dtype": torch.float16, "scaler": torch.amp.GradScaler()}
    return classifier(torch, timm_model("coatnet_0_rw_224"), 24, 224, **half)


def counts_right(torch: Any) -> Step:
    """Evaluates, and counts what was right with torchmetrics."""
    metrics = importlib.import_module("torchmetrics.classification")
    model = timm_model("ghostnet_100").cuda().eval()
    images, classes = labelled(torch, 64, 224)
    right = metrics.MulticlassAccuracy(1000, top_k=5).cuda()
    matrix = metrics.MulticlassConfusionMatrix(1000).cuda()

    def step() -> object:
        with torch.inference_mode():
            said = model(images).softmax(1)
            right.update(said, classes)
            matrix.update(said, classes)
        return right.compute().item()

    return step


def _films(torch: Any, name: str, batch: int, shape: tuple[int, int, int], **options: Any) -> Step:
    model = vision_model(name, num_classes=400).cuda()
    films = torch.randn(batch, 3, *shape, device="cuda")
    classes = torch.randint(400, (batch,), device="cuda")
    dtype = options.pop("dtype", None)

    def loss_of(model: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(films), classes)

    return training(torch, model, cast(torch, dtype, loss_of), **options)


def films_3d(torch: Any) -> Step:
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.01, "momentum": 0.9}
    return _films(torch, "r3d_18", 6, (16, 112, 112), **sgd)


def films_2d_and_1d(torch: Any) -> Step:
    half = {"dtype": torch.float16, "scaler": torch.amp.GradScaler()}
    return _films(torch, "r2plus1d_18", 6, (8, 112, 112), optimizer=torch.optim.SGD, **half)


def films_attended(torch: Any) -> Step:
    return _films(torch, "mvit_v2_s", 2, (16, 224, 224), dtype=torch.bfloat16)


def resnet34_small(torch: Any) -> Step:
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "nesterov": True}
    return classifier(torch, vision_model("resnet34"), 256, 96, weight_decay=5e-4, **sgd)


def resnet101_autocast(torch: Any) -> Step:
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "foreach": True}
    options = {"dtype": torch.bfloat16, "layout": torch.channels_last}
    return classifier(torch, vision_model("resnet101"), 32, 224, **options, **sgd)


def convnext_small(torch: Any) -> Step:
    return classifier(torch, vision_model("convnext_small"), 16, 224, lr=4e-3, weight_decay=0.05)


def swin_v2(torch: Any) -> Step:
    half = {"dtype": torch.float16, "scaler": torch.amp.GradScaler()}
    return classifier(torch, vision_model("swin_v2_t"), 16, 256, lr=1e-3, **half)


def efficientnet_tuned(torch: Any) -> Step:
    """New classes for a trained network, whose first half stays as it is."""
    nn = torch.nn
    model = vision_model("efficientnet_b0")
    model.features[:4].requires_grad_(False)
    model.classifier[1] = nn.Linear(1280, 102)
    model = model.cuda().train()
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=1e-4)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    scaler = torch.amp.GradScaler("cuda")
    images = torch.randn(64, 3, 224, 224, device="cuda")
    flowers = torch.randint(102, (64,), device="cuda")

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(images), flowers, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        rate.step()
        return float(loss)

    return step


def _residual(torch: Any, before: int, after: int, stride: int) -> Any:
    nn = torch.nn
    plain = {"padding": 1, "bias": False}
    first = nn.Conv2d(before, after, 3, stride, **plain), nn.BatchNorm2d(after), nn.ReLU()
    second = nn.Conv2d(after, after, 3, 1, **plain), nn.BatchNorm2d(after)
    short: list[Any] = []
    if stride != 1 or before != after:
        short = [nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)]
    parts = {"body": nn.Sequential(*first, *second), "short": nn.Sequential(*short)}
    return module(torch, lambda self, x: torch.relu(self.body(x) + self.short(x)), **parts)


def _cifar(torch: Any, widths: tuple[int, ...], blocks: int) -> Any:
    """A residual network of images of 32 by 32."""
    nn = torch.nn
    layers = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0])]
    layers, before = [*layers, nn.ReLU()], widths[0]
    for number, after in enumerate(widths):
        for block in range(blocks):
            stride = 2 if number and not block else 1
            layers.append(_residual(torch, before, after, stride))
            before = after
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)
    return nn.Sequential(*layers, *last).cuda()


def cifar_resnet(torch: Any) -> Step:
    """Images are shifted and flipped on the GPU."""
    functional = torch.nn.functional
    model = _cifar(torch, (64, 128, 256, 512), 2)
    images = torch.rand(4096, 3, 32, 32, device="cuda")
    classes = torch.randint(10, (4096,), device="cuda")
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    optimizer = torch.optim.SGD(model.parameters(), **sgd)

    def step() -> None:
        for some in torch.randperm(4096, device="cuda")[:512].split(128):
            x = functional.pad(images[some], (4, 4, 4, 4))[:, :, 2:34, 5:37]
            flipped = torch.rand(128, 1, 1, 1, device="cuda") < 0.5
            x = torch.where(flipped, x.flip(3), x)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), classes[some]).backward()
            optimizer.step()

    return step


def sharpness(torch: Any) -> Step:
    """Climbs to the worst weights nearby, and descends from where it was by the gradient there."""
    model = _cifar(torch, (32, 64, 128), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.rand(256, 3, 32, 32, device="cuda")
    classes = torch.randint(10, (256,), device="cuda")

    def loss() -> Any:
        return torch.nn.functional.cross_entropy(model(images), classes)

    def step() -> None:
        loss().backward()
        weights = list(model.parameters())
        with torch.no_grad():
            norm = torch.stack([w.grad.norm(p=2) for w in weights]).norm(p=2)
            climbs = [w.grad * (0.05 / (norm + 1e-12)) for w in weights]
            for weight, climb in zip(weights, climbs, strict=True):
                weight.add_(climb)
        optimizer.zero_grad()
        loss().backward()
        with torch.no_grad():
            for weight, climb in zip(weights, climbs, strict=True):
                weight.sub_(climb)
        optimizer.step()
        optimizer.zero_grad()

    return step


def vit_by_hand(torch: Any) -> Step:
    """Patches of four by four, a token for the class, and attention of `torch.nn`."""
    nn = torch.nn

    def attends(self: Any, x: Any) -> Any:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.after(x))

    def block() -> Any:
        mlp = nn.Linear(384, 1536), nn.GELU(), nn.Dropout(0.1), nn.Linear(1536, 384)
        parts = {"before": nn.LayerNorm(384), "after": nn.LayerNorm(384)}
        parts["attention"] = nn.MultiheadAttention(384, 6, dropout=0.1, batch_first=True)
        return module(torch, attends, mlp=nn.Sequential(*mlp, nn.Dropout(0.1)), **parts)

    parts = {
        "patches": nn.Conv2d(3, 384, 4, 4),
        "token": nn.Parameter(torch.zeros(1, 1, 384)),
        "places": nn.Parameter(torch.randn(1, 65, 384) * 0.02),
        "blocks": nn.Sequential(*(block() for _ in range(6))),
        "head": nn.Sequential(nn.LayerNorm(384), nn.Linear(384, 100)),
    }

    def forward(self: Any, images: Any) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])

    images = torch.randn(256, 3, 32, 32, device="cuda")
    classes = torch.randint(100, (256,), device="cuda")
    loss = torch.nn.functional.cross_entropy
    model = module(torch, forward, **parts)
    return training(torch, model, lambda m: loss(m(images), classes), lr=3e-4, weight_decay=0.1)


def inception_by_hand(torch: Any) -> Step:
    """Convolutions of four widths beside each other."""
    nn = torch.nn

    def block(before: int, *widths: int) -> Any:
        one, narrow, three, few, five, pooled = widths
        thin = {"kernel_size": 1, "padding": 0}
        branches = [
            convolved(torch, before, one, **thin),
            nn.Sequential(
                convolved(torch, before, narrow, **thin), convolved(torch, narrow, three)
            ),
            nn.Sequential(
                convolved(torch, before, few, **thin),
                convolved(torch, few, five, kernel_size=5, padding=2),
            ),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), convolved(torch, before, pooled, **thin)),
        ]

        def forward(self: Any, x: Any) -> Any:
            return torch.cat([branch(x) for branch in self.branches], 1)

        return module(torch, forward, branches=nn.ModuleList(branches))

    model = nn.Sequential(
        convolved(torch, 3, 64, kernel_size=7, stride=2, padding=3),
        nn.MaxPool2d(3, 2, 1),
        convolved(torch, 64, 192),
        nn.MaxPool2d(3, 2, 1),
        block(192, 64, 96, 128, 16, 32, 32),
        block(256, 128, 128, 192, 32, 96, 64),
        nn.MaxPool2d(3, 2, 1),
        block(480, 192, 96, 208, 16, 48, 64),
        block(512, 160, 112, 224, 24, 64, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(512, 1000),
    )
    return classifier(torch, model, 64, 224, optimizer=torch.optim.RMSprop, lr=1e-3)


def doubts(torch: Any) -> Step:
    """Asks a network that forgets at random thirty times, and tells how far its answers differ."""
    nn = torch.nn
    layers: list[Any] = []
    for before, after in ((3, 64), (64, 128), (128, 256)):
        layers += [convolved(torch, before, after), convolved(torch, after, after)]
        layers += [nn.MaxPool2d(2), nn.Dropout2d(0.2)]
    head = nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 10)
    model = nn.Sequential(*layers, *head).cuda().eval()
    for part in model.modules():
        if isinstance(part, nn.Dropout | nn.Dropout2d):
            part.train()
    images = torch.rand(256, 3, 32, 32, device="cuda")

    def step() -> object:
        with torch.no_grad():
            said = torch.stack([model(images).softmax(1) for _ in range(30)])
        mean = said.mean(0)
        unsure = -(mean * (mean + 1e-8).log()).sum(1)
        return unsure.cpu(), said.std(0).mean().item(), mean.argmax(1).cpu()

    return step


def reads_words(torch: Any) -> Step:
    """Convolutions, a recurrent network from left to right and back, and letters without places."""
    nn = torch.nn
    convs: list[Any] = []
    for before, after, pool in ((1, 64, 2), (64, 128, 2), (128, 256, None), (256, 256, (2, 1))):
        convs += [convolved(torch, before, after), *([nn.MaxPool2d(pool)] if pool else [])]
    convs += [convolved(torch, 256, 512), nn.MaxPool2d((2, 1))]
    convs += [nn.Conv2d(512, 512, (2, 1)), nn.ReLU()]
    parts = {
        "convs": nn.Sequential(*convs),
        "rnn": nn.LSTM(512, 256, 2, bidirectional=True),
        "head": nn.Linear(512, 37),
    }

    def forward(self: Any, images: Any) -> Any:
        seen = self.convs(images).squeeze(2).permute(2, 0, 1)
        return self.head(self.rnn(seen)[0]).log_softmax(2)

    images = torch.rand(128, 1, 32, 128, device="cuda")
    letters = torch.randint(1, 37, (128, 12), device="cuda")
    seen = torch.full((128,), 32, device="cuda")
    lengths = torch.randint(3, 13, (128,), device="cuda")
    loss = nn.CTCLoss(zero_infinity=True)
    model = module(torch, forward, **parts)
    adam = {"optimizer": torch.optim.Adam, "lr": 1e-3}
    return training(torch, model, lambda m: loss(m(images), letters, seen, lengths), **adam)
