"""OpenCL's queues as streams, and marks in them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from typing import Any

from bfc.drivers.opencl.platform import Home, failure, in_words, load
from bfc.errors import SubAllocatorError
from bfc.interpreter._process import ForkSafeLock

#: The error of a wait for an event that has ended with an error. The event has ended nevertheless.
ENDED_BADLY = -14

#: The extension of drivers whose objects all start with their table of functions.
ICD = "cl_khr_icd"
#: clGetDeviceInfo and clGetCommandQueueInfo: their places in a driver's table of functions
#: (cl_icd.h), what they take (object, question, bytes for the answer, the answer, its size), and
#: the questions (cl.h).
GET_DEVICE_INFO, GET_QUEUE_INFO = 3, 12
_INFO = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_uint32,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
PARENT_DEVICE, QUEUE_CONTEXT, QUEUE_DEVICE = 0x1042, 0x1090, 0x1091
#: How deeply nested sub-devices are followed.
DEPTH = 4


class WrongQueueError(SubAllocatorError):
    """A stream is not a queue, or is a queue of another context. The device has not failed."""


class Queue:
    """A command queue that a user passed as a stream. No other queue ever has its `number`."""

    __slots__ = ("handle", "is_ordered", "number", "queue")

    def __init__(self, queue: Any, number: int) -> None:
        self.queue = queue
        self.handle = int(queue.int_ptr)
        self.number = number
        self.is_ordered = is_ordered(queue)


def is_ordered(queue: Any) -> bool:
    """Whether a queue runs its commands one after the other."""
    out_of_order = load().command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
    return not queue.properties & out_of_order


class Queues:
    """The queues of one context that were passed as streams, by their handles.

    Each is retained, so that its handle cannot become another queue's, and it outlives its events.
    When there are many, those that nobody else holds are released once they are idle.
    """

    MANY = 64

    def __init__(self, context: Any, own: Any) -> None:
        self._cl = load()
        self._context = context
        self._numbers = itertools.count(1)
        self._lock = ForkSafeLock()  # a finaliser may look up a queue while others are released
        self.own = Queue(own, 0)
        right = int(context.int_ptr), int(own.device.int_ptr)
        self._can_look = can_look(own.device) and asked_as_queue(self.own.handle) == right
        self._known = {0: self.own, self.own.handle: self.own}

    def find(self, stream: int) -> Queue:
        """The queue of a handle. Raises SubAllocatorError if it is not a queue of this context."""
        found = self._known.get(stream)
        return self._remember(stream) if found is None else found

    def _remember(self, stream: int) -> Queue:
        self._refuse_what_is_none(stream)
        with in_words(f"reading the command queue {stream:#x}"):
            named = self._cl.CommandQueue.from_int_ptr(stream, retain=True)
            queue = Queue(named, next(self._numbers))
            foreign = queue.queue.context != self._context
        if foreign:
            raise foreign_queue(stream)
        with self._lock:
            if len(self._known) >= self.MANY:
                self._let_idle_go()
            return self._known.setdefault(stream, queue)

    def _refuse_what_is_none(self, stream: int) -> None:
        """Raises SubAllocatorError if a number is not a queue. pyopencl would not check it, and
        would count a reference to whatever is there."""
        if not self._can_look:
            return
        if is_object(stream, self.own.handle):
            context, device = asked_as_queue(stream)
            if self._has_device(device):
                if context == self._context.int_ptr:
                    return
                raise foreign_queue(stream)
        raise WrongQueueError(
            f"stream {stream:#x} is not a command queue: pass the pyopencl.CommandQueue"
        )

    def _has_device(self, device: int) -> bool:
        """Whether it is a device of the context, or part of one, which PoCL does not list."""
        whole = [device.int_ptr for device in self._context.devices]
        for _ in range(DEPTH):
            if device in whole:
                return True
            if not is_object(device, self.own.handle):
                return False
            device = asked(device, GET_DEVICE_INFO, PARENT_DEVICE)
        return False

    def _let_idle_go(self) -> None:
        for handle, known in list(self._known.items()):
            if known is self.own or known.queue.reference_count > 1:
                continue
            with contextlib.suppress(self._cl.Error):  # if lost, it is kept: what it ran is unknown
                known.queue.finish()
                self._known.pop(handle, None)

    def finish(self) -> None:
        """Waits for all work in all queues. Raises DriverError."""
        for known in {id(queue): queue for queue in list(self._known.values())}.values():
            with in_words(f"clFinish of the command queue {known.handle:#x}"):
                known.queue.finish()


def foreign_queue(stream: int) -> WrongQueueError:
    return WrongQueueError(
        f"the command queue {stream:#x} belongs to another context than this memory"
    )


def can_look(device: Any) -> bool:
    """Whether `is_object` can be used: the driver's objects start with its table of functions, as
    in an ICD, and invalid addresses can be read safely, as on Linux."""
    return ICD in device.platform.extensions and os.path.exists("/proc/self/mem")


def is_object(handle: int, known: int) -> bool:
    """Whether a number is the address of an object of the same driver as a known object. Needs
    `can_look`."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            first, second = (os.pread(memory.fileno(), 8, place) for place in (handle, known))
    except (OSError, OverflowError):
        return False
    return len(first) == 8 and first == second


def asked_as_queue(handle: int) -> tuple[int, int]:
    """The context and the device of a queue, as the driver reports them; 0 for none.

    Some drivers do not check that an object is a queue, and read whatever is there. But no other
    object has the right values for both. Needs `is_object`.
    """
    context, device = (asked(handle, GET_QUEUE_INFO, it) for it in (QUEUE_CONTEXT, QUEUE_DEVICE))
    return context, device


def asked(handle: int, function: int, question: int) -> int:
    """The driver's answer to a query about an object; 0 for none. It calls the driver directly,
    since pyopencl would count a reference to the answer. Needs `is_object`."""
    table = ctypes.c_void_p.from_address(handle).value or 0
    place = table + function * ctypes.sizeof(ctypes.c_void_p)
    address = ctypes.c_void_p.from_address(place).value
    answer = ctypes.c_void_p()
    if not address:
        return 0
    failed = _INFO(address)(handle, question, ctypes.sizeof(answer), ctypes.byref(answer), None)
    return 0 if failed else answer.value or 0


class MarkerFence:
    """A marker after the work that was queued. It keeps its queue alive."""

    __slots__ = ("_event", "_home", "_queue")

    def __init__(self, home: Home, queue: Queue, event: Any) -> None:
        self._home = home
        self._queue = queue
        self._event = event

    def done(self) -> bool:
        """Whether everything queued before it has finished, even with an error. Does not block."""
        event = self._event
        if event is None or not self._home.is_here:
            return True
        with in_words("clGetEventInfo"):
            status = int(event.command_execution_status)
        if status > 0:
            return False
        self._event = None
        return True

    def wait(self) -> None:
        """Blocks until everything queued before it has finished."""
        event = self._event
        if event is None or not self._home.is_here:
            return
        cl = load()
        try:
            event.wait()
        except cl.Error as error:
            if error.code != ENDED_BADLY:
                raise failure(error, "clWaitForEvents") from error
        self._event = None


class PinnedSide:
    """The part of a sub-allocator that an allocator of pinned memory needs for the OpenCL queues
    that use its blocks."""

    asynchronous = True
    default_stream_alias = None

    def __init__(self) -> None:
        self._home = Home()

    @property
    def is_here(self) -> bool:
        return self._home.is_here

    def fence(self, handle: int) -> MarkerFence | None:
        """A fence after what is queued there now; None in a forked child: nothing is queued."""
        if not self._home.is_here:
            return None
        cl = load()
        with in_words(f"clEnqueueMarker on the queue {handle:#x}"):
            queue = cl.CommandQueue.from_int_ptr(handle, True)  # kept alive by the block's use
            event = cl.enqueue_marker(queue)
            queue.flush()  # a command that is not submitted never finishes
        return MarkerFence(self._home, queue, event)


_pinned_side = PinnedSide()


def pinned_side() -> PinnedSide:
    """The PinnedSide of this process."""
    global _pinned_side
    if not _pinned_side.is_here:
        _pinned_side = PinnedSide()
    return _pinned_side
