"""A small language model, trained on random tokens: a program for `bfc predict`.

$ bfc predict examples/predicting/train_lm.py --device 24GiB

It needs PyTorch. Run by Python itself it needs a GPU, too.
"""

import argparse
import random

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 32_000


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, layers: int, again: bool) -> None:
        super().__init__()
        self.again = again
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest text")
    parser.add_argument("--steps-of-training", type=int, default=1000)
    parser.add_argument("--checkpoint", action="store_true", help="compute activations again")
    arguments = parser.parse_args()

    model = Model(arguments.width, arguments.layers, arguments.checkpoint).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    lengths = random.Random(0)
    for number in range(arguments.steps_of_training):
        longest = lengths.randrange(arguments.longest // 2, arguments.longest + 1)
        text = torch.randint(VOCABULARY, (arguments.batch, longest + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            scores = model(text[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 0:
            print(f"step {number}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
