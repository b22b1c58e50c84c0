"""Models that learn what images are like without being told what they show."""

from __future__ import annotations

import importlib
from typing import Any

from bench.programs._shared import (
    Step,
    cast,
    configured,
    descend,
    module,
    perceptron,
    timm_model,
    training,
    vision_model,
)


def _views(torch: Any, batch: int, size: int) -> tuple[Any, Any]:
    """Two views of the same images."""
    images = torch.rand(batch, 3, size, size, device="cuda")
    return images, (images.flip(3) + 0.1 * torch.randn_like(images)).clamp(0, 1)


def simclr(torch: Any) -> Step:
    """Of all views in the batch, the other of the same image should be nearest."""
    functional = torch.nn.functional
    model = vision_model("resnet18").cuda()
    model.fc = perceptron(torch, 512, 512, 128).cuda()
    views = torch.cat(_views(torch, 64, 160))
    partner = torch.arange(128, device="cuda").roll(64)
    same = torch.eye(128, device="cuda", dtype=torch.bool)

    def loss_of(model: Any) -> Any:
        found = functional.normalize(model(views).float(), dim=1)
        alike = (found @ found.T / 0.1).masked_fill(same, float("-inf"))
        return functional.cross_entropy(alike, partner)

    half = cast(torch, torch.bfloat16, loss_of)
    return training(torch, model, half, optimizer=torch.optim.SGD, lr=0.3, momentum=0.9)


def moco(torch: Any) -> Step:
    """A slow copy reads the other view; its earlier answers wait in a queue."""
    functional = torch.nn.functional
    model, slow = (vision_model("resnet34", num_classes=128).cuda() for _ in range(2))
    slow.load_state_dict(model.state_dict())
    slow.requires_grad_(False)
    queue = functional.normalize(torch.randn(16384, 128, device="cuda"), dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    left, right = _views(torch, 48, 192)
    first = torch.zeros(48, dtype=torch.long, device="cuda")
    place = 0

    def step() -> None:
        nonlocal place
        asked = functional.normalize(model(left), dim=1)
        with torch.no_grad():
            for kept, new in zip(slow.parameters(), model.parameters(), strict=True):
                kept.mul_(0.999).add_(new, alpha=0.001)
            shuffled = torch.randperm(48, device="cuda")
            keys = functional.normalize(slow(right[shuffled]), dim=1)[shuffled.argsort()]
        own = (asked * keys).sum(1, keepdim=True)
        descend(
            optimizer, functional.cross_entropy(torch.cat([own, asked @ queue.T], 1) / 0.2, first)
        )
        queue[place : place + 48] = keys
        place = (place + 48) % (16384 - 48)

    return step


def byol(torch: Any) -> Step:
    """One network foretells what its own mean over time says of the other view."""
    functional, averaging = torch.nn.functional, torch.optim.swa_utils
    online = vision_model("resnet18")
    online.fc = perceptron(torch, 512, 1024, 256)
    online.cuda()
    mean = averaging.AveragedModel(online, multi_avg_fn=averaging.get_ema_multi_avg_fn(0.99))
    foretells = perceptron(torch, 256, 1024, 256).cuda()
    weights = [*online.parameters(), *foretells.parameters()]
    optimizer = torch.optim.Adam(weights, lr=3e-4, foreach=True)
    left, right = _views(torch, 48, 160)

    def step() -> None:
        with torch.no_grad():
            wanted = [mean(right), mean(left)]
        said = [foretells(online(view)) for view in (left, right)]
        alike = map(functional.cosine_similarity, said, wanted)
        descend(optimizer, sum((2 - 2 * one).mean() for one in alike))
        mean.update_parameters(online)

    return step


def triplets(torch: Any) -> Step:
    """Faces: one of the same person should be nearer than one of another."""
    nn = torch.nn
    model = timm_model("mobilenetv2_100", num_classes=128).cuda()
    faces = torch.rand(3, 32, 3, 160, 160, device="cuda")
    loss = nn.TripletMarginLoss(margin=0.3)

    def loss_of(model: Any) -> Any:
        return loss(*(nn.functional.normalize(model(one), dim=1) for one in faces))

    return training(torch, model, loss_of, optimizer=torch.optim.Adadelta)


def masked_autoencoder(torch: Any) -> Step:
    """Three quarters of the patches are hidden, and painted from the others."""
    sizes = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6}
    decoder = {"decoder_hidden_size": 256, "decoder_num_hidden_layers": 4}
    model = configured("ViTMAE", "ForPreTraining", **sizes, **decoder, intermediate_size=1536)
    images = torch.randn(64, 3, 224, 224, device="cuda")
    loss_of = cast(torch, torch.bfloat16, lambda model: model(images).loss)
    return training(torch, model, loss_of, lr=1.5e-4, betas=(0.9, 0.95))


def clip(torch: Any) -> Step:
    """Images and texts that belong together."""
    heads = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 6}
    model = configured("CLIP", "Model", text_config=heads, vision_config=heads)
    images = torch.randn(48, 3, 224, 224, device="cuda")
    texts = torch.randint(49405, (48, 64), device="cuda")
    texts[:, -1] = 49407

    def loss_of(model: Any) -> Any:
        return model(input_ids=texts, pixel_values=images, return_loss=True).loss

    half = cast(torch, torch.float16, loss_of)
    return training(torch, model, half, scaler=torch.amp.GradScaler(), lr=1e-4)


def perceiver(torch: Any) -> Step:
    """A few latent rows read all pixels, and then one another."""
    nn, functional = torch.nn, torch.nn.functional
    rearrange = importlib.import_module("einops").rearrange
    rows = {"d_model": 256, "nhead": 8, "dim_feedforward": 1024, "batch_first": True}
    parts = {
        "latents": nn.Embedding(128, 256),
        "places": nn.Embedding(64 * 64, 32),
        "widen": nn.Linear(35, 256),
        "reads": nn.ModuleList(nn.MultiheadAttention(256, 1, batch_first=True) for _ in range(2)),
        "thinks": nn.TransformerEncoder(nn.TransformerEncoderLayer(**rows, dropout=0.0), 4),
        "head": nn.Linear(256, 100),
    }
    images = torch.randn(24, 3, 64, 64, device="cuda")
    classes = torch.randint(100, (24,), device="cuda")

    def forward(self: Any, images: Any) -> Any:
        places = self.places.weight.expand(len(images), -1, -1)
        pixels = self.widen(torch.cat([rearrange(images, "b c h w -> b (h w) c"), places], 2))
        x = self.latents.weight.expand(len(images), -1, -1)
        for read in self.reads:
            x = self.thinks(x + read(x, pixels, pixels)[0])
        return self.head(x.mean(1))

    model = module(torch, forward, **parts)
    return training(torch, model, lambda model: functional.cross_entropy(model(images), classes))
