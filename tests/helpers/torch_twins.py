"""Random tensors in twins: one on the host, one with the same bytes and strides on a device. What
is done to both must leave them equal."""

from __future__ import annotations

import random
from typing import Any

import torch

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)
#: What goes wrong in arithmetic, if anything does: among it a number below the normal ones.
SPECIAL = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45, 1e-38, 3e38)


def values(count: int, dtype: torch.dtype, dice: random.Random) -> torch.Tensor:
    """Numbers that each dtype holds: what does not fit into an integer is undefined."""
    if dtype == torch.bool:
        return torch.tensor([dice.random() < 0.5 for _ in range(count)])
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.tensor([dice.randint(0, 90) for _ in range(count)]).to(dtype)
    real = [dice.choice([0.0, -0.0, 1.0, dice.uniform(0, 90)]) for _ in range(count)]
    if not dtype.is_complex:
        return torch.tensor(real, dtype=torch.float64).to(dtype)
    both: list[Any] = [complex(x, dice.uniform(0, 90)) for x in real]
    return torch.tensor(both, dtype=torch.complex128).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor of the host, item by item."""
    plain = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
    if tensor.numel():
        plain.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return bytes(plain.numpy())


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are, but for those of NaNs, whose payload nobody promises."""
    one, other = one.cpu(), other.cpu()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point() and not torch.equal(one.isnan(), other.isnan()):
        return False
    if one.is_floating_point():
        one, other = (torch.where(side.isnan(), 0.0, side) for side in (one, other))
    return raw(one) == raw(other)


def random_shape(dice: random.Random, most: int = 4) -> tuple[int, ...]:
    counts = [1, 2, 3, 5, 8, 4, 3, 2, 1, 0]
    return tuple(dice.choice(counts) for _ in range(dice.randint(0, most)))


def that_broadcasts(shape: tuple[int, ...], dice: random.Random) -> tuple[int, ...]:
    """A shape that broadcasts to another."""
    kept = shape[dice.randint(0, len(shape)) :] if dice.random() < 0.3 else shape
    return tuple(1 if dice.random() < 0.2 else count for count in kept)


class Twins:
    """Memory of the host, and of a device with the same bytes: `whole` and `device_whole`. `here`
    and `there` are a view of each, with the same random strides and gaps."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, dice: random.Random) -> None:
        strides, step = [0] * len(shape), 1
        for dim in dice.sample(range(len(shape)), len(shape)):
            step *= dice.choice([1, 1, 1, 2])
            strides[dim] = step
            step *= max(shape[dim], 1)
        offset = dice.choice([0, 0, 1, 3])
        self.whole = values(step + offset, dtype, dice)
        self.device_whole = self.whole.to("opencl")
        self.here = self.whole.as_strided(shape, strides, offset)
        self.there = self.device_whole.as_strided(shape, strides, offset)

    def set_bits(self, conj: bool, neg: bool) -> None:
        for name in ("here", "there"):
            view = getattr(self, name)
            view = view.conj() if conj else view
            setattr(self, name, torch._neg_view(view) if neg else view)

    def season(self, dice: random.Random) -> None:
        """Puts in some of what is special."""
        for _ in range(3):
            self.whole[dice.randrange(self.whole.numel())] = dice.choice(SPECIAL)
        self.device_whole.copy_(self.whole)

    def are_same(self) -> bool:
        """Whether all memory is, in the gaps, too."""
        return are_same(self.whole, self.device_whole)
