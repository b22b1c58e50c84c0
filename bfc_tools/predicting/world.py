"""How many processes a program runs in, and which of them are predicted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

#: So many ranks are all predicted; of more, those that may differ.
ALL = 8


@dataclass(frozen=True)
class World:
    """The processes of a program: so many on each of the nodes."""

    nproc: int
    nnodes: int = 1

    @property
    def size(self) -> int:
        """How many there are in all."""
        return self.nproc * self.nnodes

    def environment(self, rank: int) -> tuple[tuple[str, str], ...]:
        """The variables that torchrun gives to one of them."""
        node, local = divmod(rank, self.nproc)
        found: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": self.size,
            "LOCAL_WORLD_SIZE": self.nproc,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": self.nnodes,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": self.size,
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none",
        }
        return tuple((name, str(value)) for name, value in found.items())


class Classes:
    """Ranks that are taken to be alike.

    Ranks are places in a mesh. Along each dimension, from rank 0, the first, the second, the middle
    and the last are predicted, and further ones between two that differ, until they are neighbours.
    Ranks between two that are alike are taken to be like them. Where ranks differ along several
    dimensions, one of each combination is predicted.
    """

    def __init__(self, world: World, meshes: Sequence[Sequence[int]] = ()) -> None:
        whole = [shape for shape in meshes if math.prod(shape) == world.size]
        several = [tuple(shape) for shape in whole if len(shape) > 1]
        #: The sizes of its dimensions, the slowest first.
        self.shape = max(several, key=len, default=(world.nnodes, world.nproc))
        self.world = world
        self._everything = world.size <= ALL

    def wanted(self, found: Mapping[int, Hashable]) -> list[int]:
        """The ranks to predict next, given what tells those apart that were; none at the end."""
        if self._everything:
            return [rank for rank in range(self.world.size) if rank not in found]
        for ranks in (self._along(found), self._combined(found)):
            new = sorted({rank for rank in ranks if rank not in found})
            if new:
                return new
        return []

    def like(self, rank: int, found: Mapping[int, Hashable]) -> int:
        """The rank that was predicted and that a rank is taken to be like."""
        if rank in found:
            return rank
        at = [self._first_like(dim, place, found) for dim, place in enumerate(self._places(rank))]
        return self._rank(at)

    def _along(self, found: Mapping[int, Hashable]) -> list[int]:
        """The ranks to predict on the lines through rank 0, and the ends of a node."""
        wanted = [self.world.nproc - 1]
        if self.world.nnodes > 1:
            wanted.append(self.world.nproc)
        wanted.append(self.world.size - 1)
        for dim, size in enumerate(self.shape):
            line = [self._on_line(dim, at) for at in range(size)]
            wanted += [line[at] for at in {0, min(1, size - 1), size // 2, size - 1}]
            known = [at for at, rank in enumerate(line) if rank in found]
            for left, right in itertools.pairwise(known):
                if right - left > 1 and found[line[left]] != found[line[right]]:
                    wanted.append(line[(left + right) // 2])
        return wanted

    def _combined(self, found: Mapping[int, Hashable]) -> list[int]:
        """One rank for each combination of places that differ."""
        places = [
            sorted({self._first_like(dim, at, found) for at in range(size)})
            for dim, size in enumerate(self.shape)
        ]
        return [self._rank(at) for at in itertools.product(*places)]

    def _first_like(self, dim: int, place: int, found: Mapping[int, Hashable]) -> int:
        """The first place of a dimension that is like another one."""
        line = {at: self._on_line(dim, at) for at in range(self.shape[dim])}
        known = [at for at, rank in line.items() if rank in found]
        nearest = max((at for at in known if at <= place), default=0)
        same = found.get(line[nearest])
        for at in reversed(known):
            if at < nearest and found[line[at]] == same:
                nearest = at
            elif at < nearest:
                break
        return nearest

    def _on_line(self, dim: int, at: int) -> int:
        return at * math.prod(self.shape[dim + 1 :])

    def _rank(self, places: Sequence[int]) -> int:
        return sum(self._on_line(dim, at) for dim, at in enumerate(places))

    def _places(self, rank: int) -> list[int]:
        found = []
        for dim in range(len(self.shape)):
            place, rank = divmod(rank, math.prod(self.shape[dim + 1 :]))
            found.append(place)
        return found


def in_words(ranks: Sequence[int]) -> str:
    """Ranks, those that follow each other as a range.

    >>> in_words([0, 1, 2, 5])
    '0-2, 5'
    """
    parts: list[str] = []
    for _, group in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)
