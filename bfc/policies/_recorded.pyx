"""What PyTorch's policy records: `memory_stats()`, the history, dumps for PyTorch's viewer; and its observers."""

import operator
import sys
import threading

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from cpython.exc cimport PyErr_Clear, PyErr_Occurred
from cython.operator cimport dereference as deref

from bfc.allocators._allocator cimport Allocator, Placement
from bfc._core cimport (
    BOTH_KINDS, HISTORY_FREE_COMPLETED, HISTORY_FREE_REQUESTED, HISTORY_OOM, HISTORY_SEGMENT_ALLOC, LARGE, SMALL,
    Gauge, History, HistoryRecord, Region, Usage,
)
from bfc.allocators._frees cimport report_unraisable

from bfc.errors import ClosedError, never_set_up, out_of_host_memory
from bfc.pytorch import words
from bfc.report.snapshot import Frame, HistoryEntry

cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cbool try_push_number "bfc::try_push_back"(vector[uint64_t]& items, uint64_t item) noexcept

_FIRST_FRAMES_ALLOWED = 1 << 14

cdef int add_gauge(dict stats, str name, Gauge gauge) except -1:
    stats[name + ".current"] = gauge.current
    stats[name + ".peak"] = gauge.peak
    stats[name + ".allocated"] = gauge.allocated
    stats[name + ".freed"] = gauge.freed
    return 0


cdef tuple python_frames():
    """The caller's frames, innermost first. Empty if there is no memory for them: the allocation must not fail."""
    frames = []
    try:
        frame = sys._getframe()
        while frame is not None:
            frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        if PyErr_Occurred() != NULL:    # Python 3.11 says None, and leaves its MemoryError behind
            PyErr_Clear()
            return ()
        return tuple(frames)
    except (ValueError, RecursionError, MemoryError):   # ValueError: a thread that Python did not start
        return ()


cdef int attach(list attached, object function, str kind) except -1:
    if not callable(function):
        raise TypeError(f"{kind} is a function, not {type(function).__name__}")
    attached.append(function)
    return 0


cdef int detach(list attached, object function, str kind) except -1:
    if function not in attached:
        raise ValueError(f"{function!r} is not {kind} of this allocator")
    attached.remove(function)
    return 0


@cython.no_gc_clear
cdef class Recorded(Allocator):
    """What PyTorch's policy counts and records: a part of `CachingAllocator`."""

    def __cinit__(self, *args, **kwargs):
        self.callbacks = []
        self.observers = []
        self.observing = threading.local()
        self.frames = {}
        self.free_frames = {}
        self.region_frames = {}
        self.frames_allowed = _FIRST_FRAMES_ALLOWED
        self.first_max_split_size = -1

    # -- statistics ---------------------------------------------------------------------------------------------------

    def memory_stats(self):
        """PyTorch's counters by PyTorch's keys, as `torch.cuda.memory_stats()` returns them.

        Returns
        -------
        dict of str to int
            Sorted by key. Each group has `.all`, `.small_pool` and `.large_pool`, and in each
            `.current`, `.peak`, `.allocated` and `.freed`. Bytes are those of whole chunks, except for
            `requested_bytes`.

        Raises
        ------
        ClosedError
            If the allocator's `__init__` has not finished.

        Notes
        -----
        Cost: O(1), no device call. Source: PyTorch's behaviour, 3.1.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> buffer = allocator.allocate("3 MiB")
        >>> stats = allocator.memory_stats()
        >>> stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
        (3145728, 20971520)
        """
        cdef Usage usage
        cdef int group
        cdef dict stats = {}
        if self.pool.usage == NULL:
            raise never_set_up()
        self.catch_up()
        self.acquire()
        usage = self.pool.usage[0]
        retries, ooms, syncs = self.num_alloc_retries, self.num_ooms, self.num_sync_all_streams
        self.lock.release()
        for group, name in enumerate(words.GROUPS):
            add_gauge(stats, f"{name}.all", usage.read(group, BOTH_KINDS))
            add_gauge(stats, f"{name}.small_pool", usage.read(group, SMALL))
            add_gauge(stats, f"{name}.large_pool", usage.read(group, LARGE))
        add_gauge(stats, "oversize_allocations", usage.oversize_allocations)
        add_gauge(stats, "oversize_segments", usage.oversize_segments)
        stats.update(num_alloc_retries=retries, num_ooms=ooms, num_sync_all_streams=syncs,
                     num_device_alloc=usage.num_device_alloc, num_device_free=usage.num_device_free,
                     max_split_size=self.first_max_split_size)
        return dict(sorted(stats.items()))

    def memory_summary(self, abbreviated=False):
        """The counters as a table, laid out as by `torch.cuda.memory_summary()`.

        Parameters
        ----------
        abbreviated : bool, optional
            Leave out the small and the large pool.

        Returns
        -------
        str
            Many lines.

        Notes
        -----
        Source: PyTorch's behaviour, 3.2.

        Examples
        --------
        >>> import bfc
        >>> print(bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")).memory_summary()[:20])
        |===================
        """
        from bfc.report.summary import summary

        return summary(self.memory_stats(), str(self.device), abbreviated)

    def reset_accumulated_stats(self):
        """Restart the counts that only rise from 0. Current values and peaks stay."""
        Allocator.reset_accumulated_stats(self)
        self.acquire()
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.lock.release()

    # -- history ------------------------------------------------------------------------------------------------------

    def record_history(self, enabled="all", *, context="all", stacks="python", max_entries=None, skip_actions=()):
        """Start to record what happens, as `torch.cuda.memory._record_memory_history()` does.

        What was recorded before is dropped.

        Parameters
        ----------
        enabled : {"all", "state", None}, optional
            "all" records a history; "state" only keeps the Python frames of what is live; None stops.
        context : {"all", "alloc", "state", None}, optional
            Keep the Python frames of allocations ("alloc" or "state"), of frees too ("all"), or of
            neither (None).
        stacks : {"python"}, optional
            C++ frames ("all" in PyTorch) cannot be had.
        max_entries : int, optional
            How many entries to keep, the newest; None keeps all.
        skip_actions : iterable of str, optional
            Actions that are not recorded, such as "free_requested".

        Raises
        ------
        ValueError
            If an argument is none of its choices, or `max_entries` is negative.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: 64 bytes an entry; some microseconds for the frames of each call. Source: PyTorch's behaviour, 3.4.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.record_history()
        >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
        >>> [entry.action for entry in allocator.history()]
        ['segment_alloc', 'alloc', 'free_requested', 'free_completed']
        """
        cdef History* fresh = NULL
        cdef uint32_t skipped = 0
        if enabled not in (None, "state", "all"):
            raise ValueError(f"enabled is None, 'state' or 'all', not {enabled!r}")
        if context not in (None, "state", "alloc", "all"):
            raise ValueError(f"context is None, 'state', 'alloc' or 'all', not {context!r}")
        if stacks != "python":
            raise ValueError(f"stacks is 'python', not {stacks!r}: C++ frames are not collected")
        if max_entries is not None and not 0 <= operator.index(max_entries) <= sys.maxsize:
            raise ValueError(f"max_entries is a count, or None for all, not {max_entries}")
        for action in skip_actions:
            if action not in words.ACTIONS:
                raise ValueError(f"there is no action {action!r} to skip; there are {', '.join(words.ACTIONS)}")
            skipped |= 1 << words.ACTIONS.index(action)
        if enabled is not None:
            most = 1 if enabled == "state" else sys.maxsize if max_entries is None else max(1, max_entries)
            fresh = new History(most, skipped)
        self.acquire()
        cdef bint is_closed = self.is_closed
        if not is_closed:
            fresh, self.pool.history = self.pool.history, fresh
        self.lock.release()
        del fresh
        if is_closed:
            raise ClosedError("this allocator is closed: nothing happens any more that could be recorded")
        self.keeps_frames = enabled is not None and context is not None
        self.keeps_free_frames = enabled is not None and context == "all"
        self.must_look = self.has_more_to_do()
        self.frames.clear()
        self.free_frames.clear()
        self.region_frames.clear()

    def history(self):
        """What `record_history` has recorded, oldest first.

        Returns
        -------
        list of HistoryEntry
            Empty if nothing is recorded.

        Notes
        -----
        Cost: O(n) in the entries.
        """
        cdef vector[HistoryRecord] records
        cdef bint copied = True
        self.catch_up()
        self.acquire()
        if self.pool.history != NULL:
            copied = self.pool.history.copy(records)
        self.lock.release()
        if not copied:
            raise out_of_host_memory()
        return self.entries_of(records)

    def dump(self, path):
        """Write `snapshot().to_torch()` as a pickle that PyTorch's memory viewer opens.

        Parameters
        ----------
        path : str or os.PathLike
            The file to write. See `Snapshot.dump`.
        """
        self.snapshot().dump(path)

    cdef list entries_of(self, vector[HistoryRecord]& records):
        cdef list entries = []
        cdef HistoryRecord record
        for record in records:
            if record.action == HISTORY_SEGMENT_ALLOC:
                frames = self.region_frames.get(record.addr, ())
            elif record.action in (HISTORY_FREE_REQUESTED, HISTORY_FREE_COMPLETED):
                frames = self.free_frames.get(record.allocation_id, ())
            else:
                frames = self.frames.get(record.allocation_id, ())
            entries.append(HistoryEntry(words.ACTIONS[record.action], record.addr, record.size, record.stream,
                                        record.time_us, (record.pool[0], record.pool[1]), frames))
        return entries

    # -- frames -------------------------------------------------------------------------------------------------------

    cdef tuple frames_of(self, int64_t allocation_id, uint64_t region):
        return self.region_frames.get(region, ()) if region else self.frames.get(allocation_id, ())

    cdef int allocated(self, Placement* placed, uint64_t changes_before) except -1:
        if self.keeps_frames:
            try:
                self.keep_frames(placed.allocation_id, placed.ptr, changes_before, python_frames())
            except MemoryError:
                pass    # the allocation succeeds without its frames
        return 0

    cdef bint has_more_to_do(self) noexcept:
        """Whether an allocation or a free is more than the pool's affair: see `must_look`."""
        return self.keeps_frames or self.keeps_free_frames

    cdef int keep_frames(self, int64_t allocation_id, uint64_t ptr, uint64_t changes, tuple frames) except -1:
        cdef cmap[uint64_t, Region].iterator found
        cdef uint64_t region = 0
        self.frames[allocation_id] = frames
        if changes != self.changes.get():
            self.acquire()
            found = self.pool.regions.upper_bound(ptr)
            if found != self.pool.regions.end():
                region = deref(found).second.ptr
            self.lock.release()
            self.region_frames[region] = frames
        return self.bound_frames()

    cdef int freeing(self, int64_t allocation_id) except -1:
        if self.keeps_free_frames:
            self.free_frames[allocation_id] = python_frames()
        return 0

    cdef int bound_frames(self) except -1:
        if len(self.frames) + len(self.free_frames) + len(self.region_frames) > self.frames_allowed:
            self.forget_frames()
        return 0

    cdef int forget_frames(self) except -1:
        """Drops the frames that neither the history nor a live chunk refers to."""
        cdef size_t i
        cdef vector[uint64_t] live      # a Python set would call for memory, and hence for anything, under the lock
        cdef cbool copied = True
        cdef int64_t newest
        cdef vector[HistoryRecord] records
        cdef vector[Region] regions
        self.acquire()
        if self.pool.history != NULL:
            copied = self.pool.history.copy(records)
        copied = copied and self.pool.list_regions(regions, True)
        for i in range(self.pool.chunk_count):
            if self.pool.chunks[i].allocation_id > 0:
                copied = copied and try_push_number(live, <uint64_t>self.pool.chunks[i].allocation_id)
        newest = self.pool.next_allocation_id
        self.lock.release()
        if not copied:
            return 0        # the host has no memory: they go another time
        wanted = set(live)
        known = set()
        for record in records:
            wanted.add(record.allocation_id)
            if record.action == HISTORY_SEGMENT_ALLOC:
                known.add(record.addr)
        for region in regions:
            known.add(region.ptr)
        self.region_frames = {key: kept for key, kept in self.region_frames.items() if key in known}
        # a collection of garbage above may have let other threads on
        self.frames = {key: kept for key, kept in self.frames.items() if key in wanted or key >= newest}
        self.free_frames = {key: kept for key, kept in self.free_frames.items() if key in wanted or key >= newest}
        self.frames_allowed = max(_FIRST_FRAMES_ALLOWED, 2 * (len(self.frames) + len(self.free_frames)
                                                              + len(self.region_frames)))
        return 0

    cdef int note_refusal(self, uint64_t rounded, uint64_t device_free, uint64_t stream, uint64_t* pool) except -1:
        """Counts a request that is refused, and adds it to the history."""
        cdef int64_t number = 0
        self.acquire()
        self.num_ooms += 1
        if self.pool.history != NULL:
            number = self.pool.next_allocation_id   # of its own, to find its frames by
            self.pool.next_allocation_id += 1
            self.pool.history.add(
                HistoryRecord(device_free, rounded, stream, [pool[0], pool[1]], 0, number, HISTORY_OOM))
        self.lock.release()
        if number and self.keeps_frames:
            self.frames[number] = python_frames()
            self.bound_frames()
        return 0

    # -- observers and callbacks --------------------------------------------------------------------------------------

    def add_free_memory_callback(self, callback):
        """Call a function whenever no free chunk fits, before a segment is asked for.

        Parameters
        ----------
        callback : callable
            Called without arguments and without a lock. It may free memory; if it returns True, the
            free memory is searched again. An exception is reported through `sys.unraisablehook` and
            counts as False.

        Raises
        ------
        TypeError
            If `callback` is not callable.

        Notes
        -----
        Source: PyTorch's behaviour, 2.7.
        """
        attach(self.callbacks, callback, "a free-memory callback")
        self.has_callbacks = True

    def remove_free_memory_callback(self, callback):
        """Remove a function that was given to `add_free_memory_callback`.

        Parameters
        ----------
        callback : callable
            The function.

        Raises
        ------
        ValueError
            If it was not added.
        """
        detach(self.callbacks, callback, "a free-memory callback")
        self.has_callbacks = bool(self.callbacks)

    cdef int run_callbacks(self) except -1 with gil:
        cdef bint freed = False
        if getattr(self.observing, "is_busy", False):
            return False    # a callback that allocates
        self.observing.is_busy = True
        try:
            for callback in list(self.callbacks):
                try:
                    freed = bool(callback()) or freed
                except Exception as error:
                    report_unraisable(error, callback)
        finally:
            self.observing.is_busy = False
        return freed

    def attach_oom_observer(self, observer):
        """Call a function before OutOfMemoryError is raised.

        Parameters
        ----------
        observer : callable
            Called without a lock as `observer(ordinal, asked, limit, free)`: the device's ordinal, the
            bytes asked of the device, the limit (or, without one, the device's total), and the bytes
            free on the device. An exception is reported through `sys.unraisablehook`. Requests that are
            refused while it runs call no observer.

        Raises
        ------
        TypeError
            If `observer` is not callable.

        Notes
        -----
        Source: PyTorch's behaviour, 2.17.
        """
        attach(self.observers, observer, "an out-of-memory observer")

    def detach_oom_observer(self, observer):
        """Remove a function that was given to `attach_oom_observer`.

        Parameters
        ----------
        observer : callable
            The function.

        Raises
        ------
        ValueError
            If it was not attached.
        """
        detach(self.observers, observer, "an out-of-memory observer")

    cdef int tell_observers(self, uint64_t asked, uint64_t limit, uint64_t device_free) except -1:
        if not self.observers or getattr(self.observing, "is_busy", False):
            return 0
        self.observing.is_busy = True
        try:
            for observer in list(self.observers):
                try:
                    observer(self.device.ordinal, asked, limit, device_free)
                except Exception as error:
                    report_unraisable(error, observer)
        finally:
            self.observing.is_busy = False
        return 0
