"""Models that tests compile, as the text of a class `Block`, which takes its width. They stand in
programs that have imported torch, `torch.nn as nn` and `torch.nn.functional as functional`."""

from __future__ import annotations

MLP = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))
"""
TRANSFORMER = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.all = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.up = nn.Linear(width, width), nn.Linear(width, 4 * width)
        self.down, self.scale = nn.Linear(4 * width, width), nn.Parameter(torch.ones(width))
    def forward(self, x):
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.all(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1) / 8).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        near = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(functional.silu(self.up(near)))
"""
