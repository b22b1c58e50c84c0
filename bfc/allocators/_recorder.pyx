"""What a history writes down with its Python frames; and what PyTorch's policy counts."""

import operator
import sys

cimport cython
from cpython.exc cimport PyErr_Clear, PyErr_Occurred
from cython.operator cimport dereference as deref
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap

from bfc.native.nothrow cimport try_push_back
from bfc._core cimport (
    BOTH_KINDS, HISTORY_ANNOTATE, HISTORY_FREE_COMPLETED, HISTORY_FREE_REQUESTED, HISTORY_OOM, HISTORY_SEGMENT_ALLOC,
    LARGE, SMALL,
    Gauge, PoolReserved, Region, Usage,
)
from bfc.buffers._scopes cimport number_of_owner, owner_names
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._reading cimport ChunkRow, RegionRow, bytes_of_records

from bfc.errors import out_of_host_memory
from bfc.pytorch import words
from bfc.snapshots.columns import HistoryColumns
from bfc.snapshots.snapshot import Frame, entries_from

cdef extern from "history.hpp":
    pass
cdef extern from "usage.hpp":
    pass
cdef extern from "pool_usage.hpp":
    pass

for _mark in words.POOL_MARKS:
    number_of_owner(_mark)      # so that to write one down needs no memory, nor a number that is left

_FIRST_FRAMES_ALLOWED = 1 << 14
_RELEASE = Frame(words.OUR_FILE, 0, words.OUR_RELEASE)
_OF_POOL = Frame(words.OUR_FILE, 0, words.OUR_POOL)


cdef int add_gauge(dict stats, str name, Gauge gauge) except -1:
    stats[name + ".current"] = gauge.current
    stats[name + ".peak"] = gauge.peak
    stats[name + ".allocated"] = gauge.allocated
    stats[name + ".freed"] = gauge.freed
    return 0


cdef int add_gauges(dict stats, str name, const Gauge* gauges) except -1:
    """Adds those of both kinds together, and of each."""
    add_gauge(stats, f"{name}.all", gauges[BOTH_KINDS])
    add_gauge(stats, f"{name}.small_pool", gauges[SMALL])
    add_gauge(stats, f"{name}.large_pool", gauges[LARGE])
    return 0


cdef tuple python_frames():
    """The caller's frames, innermost first. Empty if there is no memory for them: the allocation must not fail."""
    frames = []
    try:
        # By the frames' own links: `traceback` reads source files.
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


cdef History* new_history(enabled, context, stacks, max_entries, skip_actions) except? NULL:
    """An empty history, as `record_history` is asked for one; NULL where nothing is to be recorded."""
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
    if enabled is None:
        return NULL
    # PyTorch's ring has at least one entry.
    most = 1 if enabled == "state" else sys.maxsize if max_entries is None else max(1, max_entries)
    return new History(most, skipped)


cdef uint64_t start_of_region(Pool pool, Lock& lock, uint64_t ptr) noexcept:
    """The start of the region that an address lies in, or else 0."""
    cdef uint64_t start = 0
    # Another thread's miss may add regions.
    acquire_lock(lock)
    cdef cmap[uint64_t, Region].iterator found = pool.regions.upper_bound(ptr)
    if found != pool.regions.end():
        start = deref(found).second.ptr
    lock.release()
    return start


# In a garbage cycle a buffer may be finalised after its allocator: the collector must leave the dictionaries in place.
@cython.final
@cython.no_gc_clear
cdef class Recorder:
    """Counts, a history's entries in Python's terms, and the Python frames of allocations, frees and regions.

    The records of the history itself are the pool's.
    """

    def __cinit__(self):
        self.frames = {}
        self.free_frames = {}
        self.region_frames = {}
        self.steps = {}
        self.frames_allowed = _FIRST_FRAMES_ALLOWED

    # -- statistics ----------------------------------------------------------------------------------------------------

    cdef dict stats(self, Pool pool, Lock& lock, int64_t max_split_size, uint64_t pools_below):
        """What `memory_stats` returns. `max_split_size` is the setting at the beginning. Above 0, `pools_below` adds
        the requests that were rejected, and what private pools hold whose first number is below that."""
        cdef Usage usage
        cdef int group
        cdef dict stats = {}
        cdef vector[PoolReserved] pools
        cdef PoolReserved entry
        cdef bint copied
        # The figures are of one moment, and are put into a dictionary without the lock.
        acquire_lock(lock)
        usage = pool.books.usage[0]
        copied = pool.books.pool_usage.copy(pools)
        retries, ooms, syncs = self.num_alloc_retries, self.num_ooms, self.num_sync_all_streams
        rejections = self.num_oom_rejections
        lock.release()
        if not copied:
            raise out_of_host_memory()
        for group, name in enumerate(words.GROUPS):
            add_gauge(stats, f"{name}.all", usage.read(group, BOTH_KINDS))
            add_gauge(stats, f"{name}.small_pool", usage.read(group, SMALL))
            add_gauge(stats, f"{name}.large_pool", usage.read(group, LARGE))
        add_gauge(stats, "oversize_allocations", usage.oversize_allocations)
        add_gauge(stats, "oversize_segments", usage.oversize_segments)
        stats.update(num_alloc_retries=retries, num_ooms=ooms, num_sync_all_streams=syncs,
                     num_device_alloc=usage.num_device_alloc, num_device_free=usage.num_device_free,
                     max_split_size=max_split_size)
        if pools_below:
            stats["num_oom_rejections"] = rejections
            for entry in pools:
                # Tags are pools of ours, of which PyTorch knows nothing.
                if entry.has_had and entry.first < pools_below:
                    add_gauges(stats, f"reserved_bytes_by_private_pools.{entry.first}_{entry.second}", entry.reserved)
        # PyTorch's dictionary is sorted by key.
        return dict(sorted(stats.items()))

    cdef void restart_counts(self) noexcept nogil:
        """Restarts the counts from 0. Needs the lock."""
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = self.num_oom_rejections = 0

    # -- history -------------------------------------------------------------------------------------------------------

    cdef int restart(self, enabled, context) except -1:
        """Drops the frames that are kept, and keeps those that `record_history` asks for from now on."""
        self.keeps_frames = enabled is not None and context is not None
        self.keeps_free_frames = enabled is not None and context == "all"
        # It starts anew, where PyTorch goes on with the old entries.
        self.frames.clear()
        self.free_frames.clear()
        self.region_frames.clear()
        self.steps.clear()
        return 0

    cdef list history(self, Pool pool, Lock& lock):
        cdef vector[HistoryRecord] records
        cdef bint copied = True
        # It is copied, since what makes entries of it runs Python.
        acquire_lock(lock)
        if pool.books.history != NULL:
            copied = pool.books.history.copy(records)
        lock.release()
        if not copied:
            raise out_of_host_memory()
        return list(entries_from(self.columns_of(records)))

    cdef object columns_of(self, vector[HistoryRecord]& records):
        """The records as columns, with the frames that are kept of each."""
        cdef size_t i
        cdef dict kept
        cdef list frames = None
        if self.frames or self.free_frames or self.region_frames:
            frames = []
            for i in range(records.size()):
                if records[i].action == HISTORY_SEGMENT_ALLOC:
                    # By address: a segment has no allocation id.
                    frames.append(self.region_frames.get(records[i].addr, ()))
                    continue
                kept = self.frames
                # A free has frames of its own, where it was made, under the id of its allocation.
                if records[i].action in (HISTORY_FREE_REQUESTED, HISTORY_FREE_COMPLETED):
                    kept = self.free_frames
                frames.append(kept.get(records[i].allocation_id, ()))
        cdef list steps = None
        if self.steps:
            steps = []
            for i in range(records.size()):
                steps.append(self.steps.get(records[i].allocation_id))
        return HistoryColumns(bytes_of_records(records), frames, owners=owner_names, steps=steps)

    cdef int64_t mark_release(self, Pool pool, Lock& lock, bint of_pool=False) except -1:
        """A new allocation number, with Python frames, for what goes back while the program empties the cache, or one
        private pool: in PyTorch's histories only the frames show that it was the program. 0 where nothing is
        recorded."""
        cdef int64_t number = 0
        acquire_lock(lock)
        if pool.books.history != NULL:
            number = pool.records.next_allocation_id    # of its own, as for a refusal
            pool.records.next_allocation_id += 1
        lock.release()
        if number == 0:
            return 0
        try:
            of_pool_too = (_OF_POOL,) if of_pool else ()
            self.frames[number] = (_RELEASE, *of_pool_too, *(python_frames() if self.keeps_free_frames else ()))
            self.bound_frames(pool, lock)
        # The release goes on: a history that lacks an entry is better than memory that stays.
        except MemoryError:
            return 0
        return number

    cdef int note_refusal(self, Pool pool, Lock& lock, uint64_t rounded, uint64_t device_free, Lane* lane,
                          uint32_t owner) except -1:
        """Counts a request that is refused, and adds it to the history."""
        cdef int64_t number = 0
        acquire_lock(lock)
        # Counted whether a history is kept or not, and under the lock, as threads without the GIL count here.
        self.num_ooms += 1
        if pool.books.history != NULL:
            number = pool.records.next_allocation_id    # of its own, to find its frames by
            pool.records.next_allocation_id += 1
            pool.books.history.add(HistoryRecord(device_free, rounded, lane.stream, [lane.pool[0], lane.pool[1]], 0,
                                                 number, HISTORY_OOM, owner))
        lock.release()
        if number and self.keeps_frames:
            self.frames[number] = python_frames()
            self.bound_frames(pool, lock)
        return 0

    cdef int note_of_pool(self, Pool pool, Lock& lock, which, str said, uint64_t stream=0) except -1:
        """Writes into the history what happens to a private pool: one of `words.POOL_MARKS`. It raises nothing, so that
        what has happened stands: the marks have their numbers."""
        cdef uint64_t first, second
        first, second = which
        # Looked at first: the name gets a number without the lock.
        acquire_lock(lock)
        cdef bint is_recorded = pool.books.history != NULL
        lock.release()
        if not is_recorded:
            return 0
        cdef uint32_t number = number_of_owner(said)
        # The history may have ended meanwhile.
        acquire_lock(lock)
        if pool.books.history != NULL:
            pool.books.history.add(HistoryRecord(0, 0, stream, [first, second], 0, 0, HISTORY_ANNOTATE, number))
        lock.release()
        return 0

    cdef bint keeps_history(self, Pool pool) noexcept:
        """Where the pool keeps no counts, hits must be slow ones while a history is kept: only these are noted."""
        if self.keeps_frames or self.keeps_free_frames:
            return True
        return pool.books.history != NULL and pool.books.usage == NULL

    # -- frames --------------------------------------------------------------------------------------------------------

    cdef list frames_of_chunks(self, vector[ChunkRow]& chunks):
        """The Python frames of the allocation in each chunk; None: none are kept."""
        cdef size_t i
        cdef list found = None
        if self.frames:
            found = []
            for i in range(chunks.size()):
                # Free chunks have the id -1; ids of live ones begin at 1.
                found.append(self.frames.get(chunks[i].allocation_id, ()) if chunks[i].allocation_id > 0 else ())
        return found

    cdef list steps_of_chunks(self, vector[ChunkRow]& chunks):
        """The step of the allocation in each chunk, or None; None for the list: there are none."""
        cdef size_t i
        cdef list found = None
        if self.steps:
            found = []
            for i in range(chunks.size()):
                found.append(self.steps.get(chunks[i].allocation_id))
        return found

    cdef list frames_of_regions(self, vector[RegionRow]& regions):
        """The Python frames of the allocation that each region was taken for; None: none are kept."""
        cdef size_t i
        cdef list found = None
        if self.region_frames:
            found = []
            for i in range(regions.size()):
                found.append(self.region_frames.get(regions[i].home, ()))
        return found

    cdef int keep_frames(self, Pool pool, Lock& lock, int64_t allocation_id, uint64_t ptr, bint region_came,
                         object step) except -1:
        """Keeps the Python frames of the call that made an allocation, and its step. If the host has no memory for
        them, the allocation succeeds all the same."""
        try:
            frames = python_frames()
            self.frames[allocation_id] = frames
            if step is not None:
                self.steps[allocation_id] = step
            if region_came:
                # PyTorch shows a segment with the stack of the request that it was taken for.
                self.region_frames[start_of_region(pool, lock, ptr)] = frames
            return self.bound_frames(pool, lock)
        except MemoryError:
            return 0

    cdef int keep_free_frames(self, int64_t allocation_id) except -1:
        self.free_frames[allocation_id] = python_frames()
        return 0

    cdef int bound_frames(self, Pool pool, Lock& lock) except -1:
        # Only when they have doubled, so that each costs a constant share.
        if <size_t>(len(self.frames) + len(self.free_frames) + len(self.region_frames)) > self.frames_allowed:
            self.forget_frames(pool, lock)
        return 0

    cdef int forget_frames(self, Pool pool, Lock& lock) except -1:
        """Drops the frames that neither the history nor a live chunk refers to."""
        cdef size_t i
        cdef vector[uint64_t] live      # a Python set would call for memory, and hence for anything, under the lock
        cdef cbool copied = True
        cdef int64_t newest
        cdef vector[HistoryRecord] records
        cdef vector[Region] regions
        # What lives and what the history has is read at one moment; the frames are sorted out without the lock.
        acquire_lock(lock)
        if pool.books.history != NULL:
            copied = pool.books.history.copy(records)
        copied = copied and pool.list_regions(regions, True)
        for i in range(pool.chunk_count):
            if pool.chunks[i].allocation_id > 0:
                copied = copied and try_push_back(live, <uint64_t>pool.chunks[i].allocation_id)
        newest = pool.records.next_allocation_id
        lock.release()
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
        # a garbage collection above may have let other threads run
        self.frames = {key: kept for key, kept in self.frames.items() if key in wanted or key >= newest}
        self.free_frames = {key: kept for key, kept in self.free_frames.items() if key in wanted or key >= newest}
        self.steps = {key: kept for key, kept in self.steps.items() if key in wanted or key >= newest}
        self.frames_allowed = max(_FIRST_FRAMES_ALLOWED, 2 * (len(self.frames) + len(self.free_frames)
                                                              + len(self.region_frames)))
        return 0
