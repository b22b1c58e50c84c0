"""The tables of a trace: owners, and places in a program, which become objects when needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from bfc.errors import TraceError
from bfc.libraries import NDArray, np
from bfc.snapshots.snapshot import Frame


class FrameTable(Sequence[Frame]):
    """Frames as arrays, two of numbers and one of text, so that a million frames need few objects.

    Parameters
    ----------
    texts : numpy.ndarray of uint8
        All texts, in UTF-8, end to end.
    ends : numpy.ndarray of uint64
        Where each text ends.
    rows : numpy.ndarray of uint32, shape (frames, 3)
        The number of the file's text, the line, and the number of the function's text.

    Raises
    ------
    TraceError
        If a number is beyond its table.

    Notes
    -----
    It is equal to any sequence of the same frames.
    """

    __slots__ = ("ends", "rows", "texts")

    def __init__(
        self, texts: NDArray[np.uint8], ends: NDArray[np.uint64], rows: NDArray[np.uint32]
    ) -> None:
        if texts.ndim != 1 or ends.ndim != 1 or rows.ndim != 2 or rows.shape[1] != 3:
            raise TraceError("the table of frames is not texts, their ends, and rows of three")
        last = np.concatenate([np.zeros(1, np.uint64), ends])
        if (last[1:] < last[:-1]).any() or int(last[-1]) != len(texts):
            raise TraceError("the texts of the frames do not end where they are said to")
        if len(rows) and int(rows[:, (0, 2)].max()) >= len(ends):
            raise TraceError("a frame names a text that is not there")
        for array in (texts, ends, rows):
            array.flags.writeable = False
        self.texts, self.ends, self.rows = texts, ends, rows

    @classmethod
    def of(cls, frames: Iterable[tuple[str, int, str]]) -> FrameTable:
        """The table of the given (filename, line, name), in their order."""
        if isinstance(frames, cls):
            return frames
        numbers: dict[str, int] = {}
        rows = []
        for filename, line, name in frames:
            if not 0 <= line < 1 << 32:
                raise TraceError(f"a frame has the line {line}")
            file_number = numbers.setdefault(filename, len(numbers))
            rows.append((file_number, line, numbers.setdefault(name, len(numbers))))
        encoded = [text.encode("utf-8", "surrogatepass") for text in numbers]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.uint64)
        texts = np.frombuffer(b"".join(encoded), np.uint8)
        return cls(texts, ends, np.array(rows, np.uint32).reshape(-1, 3))

    @classmethod
    def of_arrays(cls, texts: NDArray[Any], ends: NDArray[Any], rows: NDArray[Any]) -> FrameTable:
        """The table from the arrays of a file, which may have any integer types."""

        def fixed(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
            top = np.iinfo(dtype).max
            if array.size and (
                array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) > top
            ):
                raise TraceError("the table of frames holds something other than its numbers")
            copied: NDArray[Any] = array.astype(dtype)
            return copied

        return cls(fixed(texts, np.uint8), fixed(ends, np.uint64), fixed(rows, np.uint32))

    @property
    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint32]]:
        """The texts, their ends, and the rows."""
        return self.texts, self.ends, self.rows

    def __reduce__(self) -> tuple[object, ...]:
        return FrameTable.of_arrays, self.arrays

    def text(self, number: int) -> str:
        """A text by its number."""
        start = int(self.ends[number - 1]) if number else 0
        raw = self.texts[start : int(self.ends[number])].tobytes()
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return raw.decode("utf-8", "backslashreplace")

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Frame: ...
    @overload
    def __getitem__(self, index: slice) -> list[Frame]: ...
    def __getitem__(self, index: int | slice) -> Frame | list[Frame]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        file_number, line, name = self.rows[index].tolist()
        return Frame(self.text(file_number), line, self.text(name))

    def __iter__(self) -> Iterator[Frame]:
        for at in range(len(self)):
            yield self[at]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(one == another for one, another in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<bfc.trace.FrameTable, {len(self)} frames>"


def checked_owners(owners: Iterable[str]) -> tuple[str, ...]:
    """The names of owners. Raises TraceError if one is not a string."""
    names = tuple(owners)
    if isinstance(owners, str) or not all(isinstance(name, str) for name in names):
        raise TraceError("owners are str")
    return names


def checked_stacks(stacks: Any, frames: int) -> NDArray[np.uint32]:
    """The table of stacks as a read-only array. Raises TraceError if a row has a number that is
    not in its table, or a parent that does not stand before it."""
    rows = np.asarray(stacks)
    if rows.ndim != 2 or rows.shape[1] != 2 or (rows.size and rows.dtype.kind not in "iu"):
        raise TraceError("stacks are rows of two integers: parent and frame")
    if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= 1 << 32):
        raise TraceError(f"stacks hold numbers outside 0 to {(1 << 32) - 1}")
    if len(rows) and rows[0].any():
        raise TraceError("stack 0 is the empty one: its row must be 0, 0")
    if (rows[1:, 0] >= np.arange(1, max(len(rows), 1))).any():
        raise TraceError("a stack's parent must stand before it")
    if len(rows) > 1 and int(rows[1:, 1].max()) >= frames:
        raise TraceError("a stack names a frame that is not there")
    fixed = rows.astype(np.uint32, copy=False).tobytes()
    return np.ndarray(rows.shape, np.uint32, fixed)
