"""Small programs with no recording behind them: a ResNet, a decoder, a U-Net, an LSTM, a ViT."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import nn


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(2))
        same = inner == outer and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norms[0](self.first(x)), inplace=True)
        return functional.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


class Block(nn.Module):
    """Attention and a network of two layers, each behind a norm."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """A language model as of Hugging Face: embeddings, blocks, and a head of the same weights."""

    def __init__(self, words: int = 512, width: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 4, True) for _ in range(2))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.words.weight.t()


class UNet(nn.Module):
    """Down and up again, with what was found on the way down beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 32, 3, 1, 1)
        self.down, self.up = nn.Conv2d(32, 64, 3, 2, 1), nn.ConvTranspose2d(64, 32, 2, 2)
        self.norms = nn.ModuleList([nn.GroupNorm(8, 32), nn.GroupNorm(8, 64)])
        self.leave = nn.Conv2d(64, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = functional.silu(self.norms[0](self.enter(x)))
        low = functional.silu(self.norms[1](self.down(high)))
        return self.leave(torch.cat([high, self.up(low)], 1))


class Classifier(nn.Module):
    """An LSTM over words, whose last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(512, 64)
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(128, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(tokens))[0][:, -1])


class ViT(nn.Module):
    """Patches of an image as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 128, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 128))
        self.blocks = nn.Sequential(*(Block(128, 4, False) for _ in range(2)))
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.blocks(tokens)[:, 0])


def resnet() -> nn.Module:
    """A small ResNet."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Residual(32, 32, 1),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def images() -> torch.Tensor:
    """Eight of 32 by 32."""
    return torch.randn(8, 3, 32, 32, device="cuda")


def tokens() -> torch.Tensor:
    """Four sequences of 64 words."""
    return torch.randint(0, 512, (4, 64), device="cuda")


Make = Callable[[], nn.Module]
Data = Callable[[], torch.Tensor]
Optimizer = Callable[..., torch.optim.Optimizer]


def fused(parameters: object) -> torch.optim.Optimizer:
    """AdamW in one kernel."""
    return torch.optim.AdamW(parameters, fused=True)  # type: ignore[arg-type]


def momentum(parameters: object) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]


#: The model, its data, its optimizer, the states of each parameter, and the type of autocast.
PROGRAMS: dict[str, tuple[Make, Data, Optimizer, int, torch.dtype | None]] = {
    "resnet": (resnet, images, momentum, 1, None),
    "decoder": (Decoder, tokens, fused, 2, torch.bfloat16),
    "unet": (UNet, images, torch.optim.AdamW, 2, torch.float16),
    "lstm": (Classifier, tokens, torch.optim.Adam, 2, None),
    "vit": (ViT, images, torch.optim.AdamW, 2, torch.bfloat16),
}


def step(
    model: nn.Module,
    data: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype | None,
) -> None:
    """One step of a training."""
    with torch.autocast("cuda", dtype=dtype or torch.float16, enabled=dtype is not None):
        loss = model(data).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
