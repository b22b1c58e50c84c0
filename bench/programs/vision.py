"""Models that say what is in an image or a film."""

from __future__ import annotations

import importlib
from typing import Any

from bench.programs._shared import (
    Step,
    cast,
    classifier,
    labelled,
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
