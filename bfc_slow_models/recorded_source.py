"""Records what a source answers an allocator, so that a model gets the same answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bfc.devices import Fence
from bfc.suballocators.base import MAPPING_CALLS, SubAllocator


class Differs(AssertionError):  # noqa: N818 - what is the case, not what went wrong
    """The model asks its source for something that the allocator did not ask for."""


class Unfollowable(Exception):  # noqa: N818 - an answer, not an error
    """The source raised an error, after which no model says what comes next."""


@dataclass
class Heard:
    """A fence, and what it answered so far."""

    fence: Fence | None
    answers: deque[bool] = field(default_factory=deque)

    def done(self) -> bool:
        """Queries the fence itself."""
        self.answers.append(self.fence is None or self.fence.done())
        return self.answers[-1]

    def wait(self) -> None:
        """Waits for the fence itself."""
        if self.fence is not None:
            self.fence.wait()


#: The calls for memory that is mapped.
MAPPING = (*MAPPING_CALLS, "wait")


@dataclass(frozen=True)
class Call:
    """One call: "alloc" (`nbytes` asked for, the block or None, or what was raised), "free" (the
    block), "fence" (the stream, the fence), or one of `MAPPING` (its first argument; the others in
    `rest`)."""

    kind: str
    number: int
    answer: Any
    rest: tuple[Any, ...] = ()

    @classmethod
    def of(cls, kind: str, number: int, rest: Sequence[Any], answer: Any) -> Call:
        """With tuples in place of lists, which would change, and differ from tuples."""
        fixed = tuple(tuple(one) if isinstance(one, Sequence) else one for one in rest)
        return cls(kind, number, answer, fixed)

    def __str__(self) -> str:
        number = hex(self.number) if self.number >= 1 << 32 else self.number
        arguments = ", ".join(map(str, (number, *self.rest)))
        return f"{self.kind}({arguments}) -> {self.answer}"


class Tape:
    """Records the calls of a source from now on. Each is kept until the model has made the same
    one.

    `live` holds the bytes of the blocks that are handed out and of the pages that are mapped, by
    address.
    """

    def __init__(self, source: SubAllocator) -> None:
        self.source = source
        self.calls: deque[Call] = deque()
        self.live: dict[int, int] = {}
        self.keeps = True
        self._is_freeing = self._is_inside = False
        self._pages: dict[int, int] = {}
        self._alloc, self._free, self._free_idle = source.alloc, source.free, source.free_idle
        self._fence = source.fence
        vars(source).update(
            alloc=self._heard_alloc,
            free=lambda address, nbytes: self._heard_free(self._free, address, nbytes),
            free_idle=lambda address, nbytes: self._heard_free(self._free_idle, address, nbytes),
            fence=self._heard_fence,
        )
        if source.supports_virtual_memory:
            vars(source).update({kind: self._hearing(kind) for kind in MAPPING})

    def stop(self) -> None:
        """Stops recording."""
        for name in ("alloc", "free", "free_idle", "fence", *MAPPING):
            vars(self.source).pop(name, None)

    def forget(self) -> None:
        """Drops the recorded calls: there is no model any more."""
        self.keeps = False
        self.calls.clear()

    def _keep(self, kind: str, number: int, answer: Any, rest: Sequence[Any] = ()) -> None:
        if self.keeps:
            self.calls.append(Call.of(kind, number, rest, answer))

    def _heard_alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        try:
            block = self._alloc(alignment, nbytes)
        except MemoryError:
            self._keep("alloc", nbytes, None)
            raise
        except BaseException as error:
            self._keep("alloc", nbytes, error)
            raise
        self._keep("alloc", nbytes, block)
        if isinstance(block, tuple) and len(block) == 2:
            self.live[block[0]] = block[1]
        return block

    def _heard_free(self, free: Any, address: int, nbytes: int) -> None:
        if self._is_freeing:  # free_idle, which calls free
            free(address, nbytes)
            return
        self._is_freeing = True
        try:
            free(address, nbytes)
        except BaseException as error:
            self._keep("free", address, error)
            raise
        finally:
            self._is_freeing = False
        self._keep("free", address, nbytes)
        end = address + nbytes
        while address < end and address in self.live:
            address += self.live.pop(address)

    def _hearing(self, kind: str) -> Any:
        """A call of the source of that kind that the tape also records."""
        called = getattr(self.source, kind)

        def hear(first: int, *rest: Any) -> Any:
            if self._is_inside:  # a call by which the source makes another
                return called(first, *rest)
            self._is_inside = True
            try:
                answer = called(first, *rest)
            except BaseException as error:
                self._keep(kind, first, error, rest)
                raise
            finally:
                self._is_inside = False
            self._keep(kind, first, answer, rest)
            self._note(kind, first, rest, answer)
            return answer

        return hear

    def _note(self, kind: str, first: int, rest: tuple[Any, ...], answer: Any) -> None:
        """Keeps `live` up to date with what is mapped."""
        if kind == "create" and answer is not None:
            self._pages[answer] = first
        elif kind == "map":
            for page in rest[0]:
                self.live[first] = self._pages[page]
                first += self._pages[page]
        elif kind == "unmap":
            end = first + rest[0]
            while first < end:
                first += self.live.pop(first)

    def _heard_fence(self, stream: int) -> Fence | None:
        if self._is_inside:  # `wait`, which asks for a fence
            return self._fence(stream)
        try:
            heard = Heard(self._fence(stream))
        except BaseException as error:
            self._keep("fence", stream, error)
            raise
        self._keep("fence", stream, heard)
        return None if heard.fence is None else heard

    # -- the model asks ---------------------------------------------------------------------------

    def take(self, kind: str, number: int, *rest: Any) -> Any:
        """What the source answered to this call, which must be the next one."""
        call = self.calls.popleft() if self.calls else None
        if call is not None and isinstance(call.answer, BaseException):
            raise Unfollowable(call.answer)
        asked = Call.of(kind, number, rest, "")
        if call is None or replace(call, answer="") != asked:
            told = str(asked).removesuffix(" -> ")
            raise Differs(f"the model calls {told}, the allocator {call or 'nothing'}")
        return call.answer

    def take_free(self, address: int, nbytes: int) -> None:
        """The next call must have freed this block."""
        if self.take("free", address) != nbytes:
            raise Differs(
                f"the model frees {nbytes} bytes at {address:#x}, the allocator frees others"
            )

    def take_fence(self, stream: int) -> Heard | None:
        """What the source answered, if the allocator asked for a fence."""
        if self.calls and self.calls[0].kind == "fence":
            heard: Heard = self.take("fence", stream)
            return heard
        return None

    def check_empty(self) -> None:
        """The model must have made all calls that the allocator made."""
        if self.calls:
            raise Differs(f"the allocator calls {self.calls[0]}, the model nothing")


class TapedSource(SubAllocator):
    """The source of TensorFlow's model."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.total_bytes = tape.source.total_bytes
        self.supports_coalescing = tape.source.supports_coalescing

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        block: tuple[int, int] | None = self.tape.take("alloc", nbytes)
        return block

    def free(self, address: int, nbytes: int) -> None:
        self.tape.take_free(address, nbytes)


class TapedFence:
    """A fence as the model queries it: it answers what the allocator's fence answered, in the same
    order."""

    def __init__(self, heard: Heard | None) -> None:
        self._answers = deque[bool]() if heard is None else heard.answers
        self._heard = heard

    def done(self) -> bool:
        """If the allocator queried it less often, the fence itself is queried."""
        if self._heard is None:
            return True
        return self._answers.popleft() if self._answers else self._heard.done()

    def wait(self) -> None:
        """The allocator has waited."""


class TapedDevice:
    """The device of PyTorch's model."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.total_bytes = tape.source.total_bytes
        self.live: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return self.tape.source.memory_info()[0]

    def malloc(self, nbytes: int) -> int | None:
        """The address of a block; `live` has its bytes."""
        block = self.tape.take("alloc", nbytes)
        if block is None:
            return None
        self.live[block[0]] = block[1]
        return int(block[0])

    def free(self, address: int, nbytes: int) -> None:
        self.tape.take_free(address, self.live.pop(address))

    def fence(self, stream: int) -> TapedFence:
        return TapedFence(self.tape.take_fence(stream))

    def __getattr__(self, kind: str) -> Any:
        """The calls for memory that is mapped."""
        if kind not in MAPPING:
            raise AttributeError(kind)
        return partial(self.tape.take, kind)
