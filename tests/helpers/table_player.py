"""Plays calls of the table of C functions, without the GIL or while somebody holds it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_table import Table

SOURCE = Path(__file__).with_suffix(".cpp")
ALLOCATE, FREE, RECORD = range(3)
#: Seconds that a thread without the GIL may take for a few calls, on a machine that is busy.
PATIENCE = 20.0
#: What a thread that waits for the GIL still needs.
_kept: list[Any] = []


class Step(ctypes.Structure):
    _fields_ = (
        ("what", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("nbytes", ctypes.c_uint64),
        ("stream", ctypes.c_int64),
    )


class Player:
    """Slots for allocations, by number, and what is done with them."""

    def __init__(self, library: Path, table: Table, slots: int = 64) -> None:
        self.table = table
        self.slots = (ctypes.c_void_p * slots)()
        self._free, self._held = ctypes.CDLL(str(library)), ctypes.PyDLL(str(library))
        for loaded in (self._free, self._held):
            loaded.player_play.restype = loaded.player_play_elsewhere.restype = ctypes.c_int64
            loaded.player_hammer.restype = ctypes.c_int64

    def __getitem__(self, slot: int) -> int:
        return int(self.slots[slot] or 0)

    def play(self, *rows: Sequence[int]) -> None:
        """Each row is what is done, the slot, the bytes and the stream."""
        steps = self._steps(rows)
        done = self._free.player_play(self.table.address, steps, len(rows), self.slots)
        assert done == len(rows), f"{rows[done]} has failed"

    def made_without_gil(self, *rows: Sequence[int]) -> int:
        """How many of the steps another thread makes while this one holds the GIL."""
        steps = self._steps(rows)
        _kept.append((self, steps))
        arguments = self.table.address, steps, len(rows), self.slots, ctypes.c_double(PATIENCE)
        return int(self._held.player_play_elsewhere(*arguments))

    def play_elsewhere(self, *rows: Sequence[int]) -> None:
        """In a thread that Python has never seen, and which may take the GIL."""
        steps = self._steps(rows)
        arguments = self.table.address, steps, len(rows), self.slots, ctypes.c_double(PATIENCE)
        assert self._free.player_play_elsewhere(*arguments) == len(rows)

    def hammer(self, threads: int, steps: int, seed: int, streams: Sequence[int]) -> int:
        listed = (ctypes.c_int64 * len(streams))(*streams)
        return int(
            self._free.player_hammer(
                self.table.address,
                threads,
                ctypes.c_int64(steps),
                ctypes.c_uint64(seed),
                listed,
                ctypes.c_int64(len(streams)),
            )
        )

    @staticmethod
    def _steps(rows: Sequence[Sequence[int]]) -> Any:
        return (Step * len(rows))(*(Step(*(*row, *(0,) * (4 - len(row)))) for row in rows))
