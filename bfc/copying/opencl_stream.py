"""Copies on OpenCL devices, through pyopencl."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import pyopencl as cl

from bfc.buffers._scopes import current_stream
from bfc.copying import kernels
from bfc.copying.launch import launch_by_temporaries, plan
from bfc.copying.layout import (
    MAX_DIMS,
    Rows,
    Walk,
    packed_strides,
    pieces,
    span,
)
from bfc.copying.view import View
from bfc.copying.waiting import Waiting
from bfc.drivers.opencl import platform as _opencl
from bfc.drivers.opencl import queues as _queues
from bfc.errors import DeviceUnavailableError, OutOfMemoryError
from bfc.interpreter._process import ForkSafeLock

#: Contexts whose queue and kernels are remembered.
REMEMBERED = 8
GPU_THREADS, GPU_GROUPS = 256, 1024

LAYOUT: Any = np.dtype(
    [("to", "<i8", MAX_DIMS), ("source", "<i8", MAX_DIMS), ("shape", "<u4", MAX_DIMS)], align=True
)


class CompilerRefusedError(DeviceUnavailableError):
    """The compiler of a device does not build our kernels. Copies of plain bytes still work."""


class Context:
    """A context's kernels, and its queue for copies that name no queue."""

    def __init__(self, context: Any, device: Any) -> None:
        self.context = context
        self.device = device
        self.lock = ForkSafeLock()  # a finaliser may copy while a program is built
        self.on_cpu = bool(device.type & cl.device_type.CPU)
        self.has_double = "cl_khr_fp64" in device.extensions.split()
        self._queue: Any = None
        self._programs: dict[Hashable, Any] = {}

    def queue(self) -> Any:
        with self.lock:
            if self._queue is None:
                self._queue = cl.CommandQueue(self.context, self.device)
            return self._queue

    def kernel(self, source: str, to: str) -> Any:
        """A new kernel object, since its arguments are set in it."""
        pair = source, to
        program = self.program(pair, lambda: kernels.text_of([pair]))
        return cl.Kernel(program, kernels.kernel_name(source, to))

    def program(self, key: Hashable, text: Callable[[], str], *options: str) -> Any:
        """The program of a key, built once. Raises CompilerRefusedError; later calls raise it
        without another try."""
        with self.lock:
            if key not in self._programs:
                self._programs[key] = self._build(text(), list(options))
            found = self._programs[key]
        if isinstance(found, cl.Error):
            raise CompilerRefusedError(
                f"the OpenCL compiler of {self.device.name} does not take our kernels; a newer "
                f"driver may: {found}"
            ) from found
        return found

    def _build(self, text: str, options: list[str]) -> Any:
        """A program, or the compiler's error."""
        if self.on_cpu:
            options.append("-DONE_AFTER_THE_OTHER")
        try:
            return cl.Program(self.context, text).build(options, [self.device])
        except cl.Error as error:
            return _without_frames(error)


def _without_frames(error: BaseException) -> BaseException:
    """An error that is kept must not keep the callers' frames, and so the arrays in them."""
    at: BaseException | None = error
    while at is not None:
        at.__traceback__ = None
        at = at.__cause__ or at.__context__
    return error


_contexts: OrderedDict[tuple[int, int], Context] = OrderedDict()
_contexts_lock = ForkSafeLock()


def context_of(context: Any, device: Any) -> Context:
    key = context.int_ptr, device.int_ptr
    with _contexts_lock:
        found = _contexts.pop(key, None) or Context(context, device)
        _contexts[key] = found
        while len(_contexts) > REMEMBERED:
            _contexts.popitem(last=False)
        return found


def stream_for(view: View, stream: Any) -> OpenCLCopyStream:
    """The stream of a copy: the queue that the user passed; else that of `bfc.use_stream`; else the
    one that the memory names; else the context's own. Raises DeviceUnavailableError in a forked
    child, where a queue would wait for ever."""
    _opencl.refuse_child()
    _opencl.note_use()
    context = view.context
    queue = _chosen(context) if stream is None else _as_queue(stream, context)
    queue = queue or view.stream
    if context is None:
        if queue is None:
            raise TypeError("this memory names no OpenCL context: pass its queue as stream")
        context = queue.context
    device = queue.device if queue is not None else context.devices[0]
    return OpenCLCopyStream(context_of(context, device), queue)


def _chosen(context: Any) -> Any:
    """The queue of `bfc.use_stream`, if this memory can be used on it. (A number is a CUDA
    stream.)"""
    chosen = current_stream()
    if isinstance(chosen, cl.CommandQueue) and context in (None, chosen.context):
        return chosen
    return None


def _as_queue(stream: Any, context: Any) -> Any:
    if isinstance(stream, cl.CommandQueue):
        if context not in (None, stream.context):
            raise ValueError("the queue belongs to another OpenCL context than the memory")
        return stream
    if isinstance(stream, int) and stream and context is not None:
        own = context_of(context, context.devices[0]).queue()
        try:
            return _queues.Queues(context, own).find(stream).queue
        except _queues.WrongQueueError as error:
            raise ValueError(str(error)) from None
    raise TypeError(
        f"the stream of a copy in OpenCL is a pyopencl.CommandQueue, not {type(stream).__name__}"
    )


class OpenCLCopyStream:
    """A queue of an OpenCL device. Each command waits for the one before, even if the queue runs
    commands in any order."""

    def __init__(self, known: Context, queue: Any) -> None:
        self.known = known
        self.queue = known.queue() if queue is None else queue
        #: True if only bfc knows the queue, so that nobody else can wait for it.
        self.is_private = queue is None
        self.last: list[Any] = []
        self.earlier: list[Any] = []  # events of arrays; all work queued here comes after them
        self.kept: list[object] = []

    # -- what comes before and after ---------------------------------------------------------------

    def wait_for_users(self, *views: View) -> None:
        """Waits for the queues on which the views' memory was last used."""
        has_no_events = False
        for view in views:
            if view.events is not None:
                self.earlier.extend(view.events.events)
            if view.stream is not None and view.stream != self.queue:
                self.wait_for(view.stream)
            elif view.events is None:
                has_no_events = True
        if has_no_events and not _queues.is_ordered(self.queue):
            self.wait_for(self.queue)  # nothing else tells when such memory was last used
        self.last.extend(self.earlier)

    def note_uses(self, *views: View) -> None:
        """Tells the views' owners that the queue uses their memory. OpenCL keeps buffers until its
        commands are done, and pyopencl frees shared virtual memory after the work on the queue that
        it is bound to."""
        if self.is_private:
            self.synchronize()
            return
        for view in views:
            if view.on_host:
                continue
            if view.events is not None and self.last:
                self._note(view.events.events)
            elsewhere = view.stream is not None and view.stream != self.queue
            if elsewhere and self.last:
                cl.enqueue_barrier(view.stream, wait_for=self.last)
                self.queue.flush()
            if view.buffer is not None and view.buffer.stream != self.queue.int_ptr:
                view.buffer.allocator.record_stream(view.buffer, self.queue.int_ptr)
            if _is_unbound(view):
                self.kept.append(view.owner)
        if not self.kept or not self.last:
            return
        self.queue.flush()
        _waiting.keep(self.last[-1], tuple(self.kept))

    def _note(self, events: list[Any]) -> None:
        """Replaces the array's events that the copy has waited for with the copy's event, since
        pyopencl's `add_event` would wait for the oldest of many."""
        if self.last[-1] in self.earlier:
            return  # nothing was queued
        if self.last[-1] not in events:
            events.append(self.last[-1])
        for event in self.earlier:
            with contextlib.suppress(ValueError):  # another thread was faster
                events.remove(event)
            if isinstance(event, cl.NannyEvent):
                self.kept.append(event)

    def wait_for(self, other: Any) -> None:
        self.last.append(cl.enqueue_marker(other))
        other.flush()

    def refuse_capture(self) -> None:
        """OpenCL captures nothing."""

    def synchronize(self) -> None:
        self.queue.finish()
        self.kept.clear()

    def keep(self, host: View) -> None:
        pinned = sys.modules.get("bfc.pinned")  # not imported: no block of it exists
        found = pinned.find(host.address) if pinned is not None else None
        if found is not None:
            allocator, block = found
            allocator.record_event(host.address, block, self.queue)
            return
        # For a buffer of bfc, keep no view, so that it can be freed once the user has waited.
        self.kept.append((host.owner, None if host.buffer is not None else host.array))

    def _after(self, event: Any) -> None:
        self.last = [event]

    # -- memory ------------------------------------------------------------------------------------

    def temporary(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> View:
        strides = packed_strides(shape, dtype.itemsize)
        view = View("opencl", 0, 0, dtype, shape, strides, context=self.known.context)
        try:
            memory = cl.Buffer(self.known.context, cl.mem_flags.READ_WRITE, view.nbytes)
            # Made resident now, so that a lack of memory is found here, and not by the kernel.
            self._after(
                cl.enqueue_migrate_mem_objects(
                    self.queue,
                    [memory],
                    cl.mem_migration_flags.CONTENT_UNDEFINED,
                    wait_for=self.last,
                )
            )
        except cl.Error as error:
            if _opencl.is_no_room(error):
                raise _no_room(view.nbytes, self.known.device) from error
            raise
        view.memory = memory
        return view

    def release(self, view: View) -> None:
        """OpenCL keeps what its queued commands use."""
        view.memory.release()

    # -- copies ------------------------------------------------------------------------------------

    def move(self, to: View, source: View) -> None:
        nbytes = to.nbytes
        if to.overlaps(source):
            return self._move_overlapping(to, source)
        shared = [view.memory is None and not view.on_host for view in (to, source)]
        if any(shared) and not all(shared) and not (to.on_host or source.on_host):
            # OpenCL has no copy between shared virtual memory and a buffer.
            together = nbytes | to.address | source.address | 8
            unit = together & -together
            return self.launch(_in_units(to, unit), _in_units(source, unit), 0)
        if to.memory is not None and source.memory is not None:
            options = {
                "byte_count": nbytes, "src_offset": source.address, "dst_offset": to.address
            }  # fmt: skip
            arguments = to.memory, source.memory
        else:
            arguments = _end(to, nbytes), _end(source, nbytes)
            options = {"is_blocking": False}
            if to.memory is not None:
                options["dst_offset"] = to.address
            if source.memory is not None:
                options["src_offset"] = source.address
        self._enqueue(cl.enqueue_copy, *arguments, **options)
        return None

    def _move_overlapping(self, to: View, source: View) -> None:
        """Copies through a temporary, since OpenCL refuses to copy between overlapping ranges."""
        between = self.temporary(source.dtype, to.shape)
        try:
            self.move(between, source)
            self.move(to, between)
        finally:
            self.release(between)

    def move_rows(self, to: View, source: View, rows: Rows) -> bool:
        if (to.memory is None and not to.on_host) or (source.memory is None and not source.on_host):
            return False  # shared virtual memory has no copies of rows
        region = rows.width, rows.height, rows.depth
        pitches = (
            (rows.to_pitch, rows.to_slice), (rows.source_pitch, rows.source_slice)
        )  # fmt: skip
        if to.on_host or source.on_host:
            device = source if to.on_host else to
            of_device, of_host = pitches[::-1] if to.on_host else pitches
            ends = [view.memory if view is device else _bytes_at(view) for view in (to, source)]
            self._enqueue(
                cl.enqueue_copy, *ends, is_blocking=False, region=region, host_origin=(0, 0, 0),
                buffer_origin=(device.address, 0, 0), buffer_pitches=of_device,
                host_pitches=of_host,
            )  # fmt: skip
            return True
        if to.place == source.place:
            return False  # within a buffer OpenCL takes only rows of one pitch that lie apart
        self._enqueue(
            cl.enqueue_copy, to.memory, source.memory, region=region,
            dst_origin=(to.address, 0, 0), src_origin=(source.address, 0, 0),
            dst_pitches=pitches[0], src_pitches=pitches[1],
        )  # fmt: skip
        return True

    def _enqueue(self, function: Any, *arguments: Any, **options: Any) -> None:
        event = function(self.queue, *arguments, wait_for=self.last, **options)
        self._after(event)
        if isinstance(event, cl.NannyEvent):
            self.kept.append(event)  # dropping the event would wait for the transfer

    # -- kernels -----------------------------------------------------------------------------------

    def prepare(self, to: np.dtype[Any], source: np.dtype[Any]) -> bool:
        codes = kernels.code_of(source), kernels.code_of(to)
        if codes[0] is None or codes[1] is None:
            return False
        if kernels.needs_double(codes[0], codes[1]) and not self.known.has_double:
            return False
        self.known.kernel(codes[0], codes[1])
        return True

    def launch(self, to: View, source: View, change: int) -> None:
        overlaps = to.overlaps(source) and not to.is_same(source)
        asked = None if overlaps else plan(to, source, change)
        if asked is None:
            launch_by_temporaries(self, to, source, change)
            return
        codes, way = asked
        kernel = self.known.kernel(*codes)
        for piece in pieces(way):
            self._launch_piece(kernel, to, source, piece, change)

    def _launch_piece(self, kernel: Any, to: View, source: View, piece: Walk, change: int) -> None:
        layout = np.zeros((), LAYOUT)
        for index, dim in enumerate(piece.dims):
            layout["shape"][index] = dim.steps
            layout["to"][index], layout["source"][index] = dim.to, dim.source
        kernel.set_args(
            *_place(to, piece.to), *_place(source, piece.source), layout,
            np.uint32(piece.items), np.int32(len(piece.dims)), np.int32(change),
        )  # fmt: skip
        if self.known.on_cpu:
            groups, threads = min(piece.items, 2 * self.known.device.max_compute_units), 1
        else:
            groups, threads = min(-(-piece.items // GPU_THREADS), GPU_GROUPS), GPU_THREADS
        self._enqueue(cl.enqueue_nd_range_kernel, kernel, (groups * threads,), (threads,))


def _no_room(nbytes: int, device: Any) -> OutOfMemoryError:
    total = device.global_mem_size
    return OutOfMemoryError(
        nbytes, 0, 0, total, min(total, device.max_mem_alloc_size),
        refused=f"{device.name}, for a temporary of bfc.copy",
        advice=("copying in pieces, or between sides of one dtype without gaps",),
    )  # fmt: skip


def _place(view: View, offset: int) -> tuple[Any, Any]:
    """A kernel's arguments for one side: the memory, and the place in it where the walk starts."""
    if view.memory is not None:
        return view.memory, np.int64(view.address + offset)
    low, high = span(view.shape, view.strides, view.dtype.itemsize)
    return cl.SVM(_array_at(view.address + low, high - low)), np.int64(offset - low)


def _end(view: View, nbytes: int) -> Any:
    """An object that pyopencl can copy from or to: a buffer, or `nbytes` bytes at an address."""
    if view.memory is not None:
        return view.memory
    array = _array_at(view.address, nbytes)
    return array if view.on_host else cl.SVM(array)


def _is_unbound(view: View) -> bool:
    """Whether it is pyopencl's shared virtual memory that is freed at once when it is dropped."""
    if view.memory is not None or view.buffer is not None:
        return False
    memory = getattr(view.owner, "base_data", view.owner)
    return getattr(memory, "_queue", None) is None


def _in_units(run: View, unit: int) -> View:
    """A run of bytes as items that a kernel moves."""
    return replace(run, dtype=np.dtype(f"u{unit}"), shape=(run.nbytes // unit,), strides=(unit,))


def _bytes_at(view: View) -> Any:
    low, high = span(view.shape, view.strides, view.dtype.itemsize)
    return _array_at(view.address, high - max(low, 0))


def _array_at(address: int, nbytes: int) -> np.ndarray[Any, Any]:
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)


def _is_done(event: Any) -> bool:
    return bool(event.command_execution_status <= cl.command_execution_status.COMPLETE)


#: The memory in transfers that nobody has waited for yet.
_waiting = Waiting(_is_done)


def _finish(process: int) -> None:
    """Waits for transfers at exit, before Python drops the memory that they use."""
    if os.getpid() != process:
        # Nothing runs in a forked child, and releasing an event there would block for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_waiting))
        return
    for event in _waiting.events():
        with contextlib.suppress(cl.Error):
            event.wait()


atexit.register(_finish, os.getpid())
