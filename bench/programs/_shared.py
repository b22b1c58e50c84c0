"""What the programs share: how they train, and the models and data that several of them use."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

Step = Callable[[], object]
Loss = Callable[[Any], Any]


def descend(optimizer: Any, loss: Any, scaler: Any = None) -> None:
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def training(torch: Any, model: Any, loss_of: Loss, **options: Any) -> Step:
    """Each step descends once; `options` beside `optimizer` and `scaler` are the optimizer's."""
    make = options.pop("optimizer", torch.optim.AdamW)
    scaler = options.pop("scaler", None)
    optimizer = make(model.parameters(), **options)
    return lambda: descend(optimizer, loss_of(model), scaler)


def cast(torch: Any, dtype: Any, loss_of: Loss) -> Loss:
    """`loss_of`, with the operators that bear it in `dtype`; None leaves them as they are."""

    def loss(model: Any) -> Any:
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            return loss_of(model)

    return loss


def module(torch: Any, forward: Callable[..., Any], **parts: Any) -> Any:
    """A module of `parts`, on the GPU, which `forward` is given before the inputs."""

    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, *inputs: Any) -> Any:
            return forward(self, *inputs)

    return Module().cuda()


def perceptron(torch: Any, *widths: int, activation: Any = None) -> Any:
    nn = torch.nn
    layers: list[Any] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), (activation or nn.ReLU)()]
    return nn.Sequential(*layers[:-1])


def convolved(torch: Any, before: int, after: int, **options: Any) -> Any:
    """A convolution, three wide unless `options` say otherwise, its normalisation and a ReLU."""
    nn = torch.nn
    options = {"kernel_size": 3, "padding": 1, "bias": False} | options
    return nn.Sequential(nn.Conv2d(before, after, **options), nn.BatchNorm2d(after), nn.ReLU(True))


def configured(name: str, kind: str, **config: Any) -> Any:
    """A model of transformers on the GPU, with random weights."""
    transformers = importlib.import_module("transformers")
    made = getattr(transformers, f"{name}Config")(**config)
    return getattr(transformers, name + kind)(made).cuda().train()


def language_model(torch: Any, name: str, batch: int, length: int, **config: Any) -> Any:
    """A model of transformers, with a loss on random tokens."""
    kinds = {"Bert": "ForMaskedLM", "T5": "ForConditionalGeneration", "GPT2": "LMHeadModel"}
    model = configured(name, kinds.get(name, "ForCausalLM"), **config)
    tokens = torch.randint(model.config.vocab_size, (batch, length), device="cuda")
    return model, lambda model: model(input_ids=tokens, labels=tokens).loss


def vision_model(name: str, **options: Any) -> Any:
    """A model of torchvision with random weights."""
    models = importlib.import_module("torchvision").models
    return models.get_model(name, weights=None, **options)


def timm_model(name: str, **options: Any) -> Any:
    return importlib.import_module("timm").create_model(name, **options)


def labelled(torch: Any, batch: int, size: int, **options: Any) -> Any:
    """Images and their classes; `options` are those of `Tensor.to`."""
    images = torch.randn(batch, 3, size, size, device="cuda").to(**options)
    return images, torch.randint(1000, (batch,), device="cuda")


def classifier(torch: Any, model: Any, batch: int, size: int, **options: Any) -> Step:
    dtype, layout = options.pop("dtype", None), options.pop("layout", torch.contiguous_format)
    images, classes = labelled(torch, batch, size, memory_format=layout)
    model = model.cuda().to(memory_format=layout).train()

    def loss_of(model: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(images), classes)

    return training(torch, model, cast(torch, dtype, loss_of), **options)
