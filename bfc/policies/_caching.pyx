"""PyTorch's policy: where a request may look, and what is tried, in which order, where nothing fits."""

import math
import threading
from dataclasses import replace

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.turns cimport take_turns
from bfc._core cimport (
    IN_RANGES, IN_REGIONS, LARGE, NO_CHUNK, NO_HOST_MEMORY, NO_LANE, OPTIONS, SMALL, TOO_LARGE, UNLIMITED, BinSet,
    ChunkHandle, Lane, Region, Release, TorchSizes, find_lane, is_large,
)
from bfc.buffers._buffer cimport HOST_STREAM
from bfc.allocators._private_pools cimport (
    PoolId, default_pool, holds_memory, id_of, is_among, is_default, is_private, is_same_pool, pool_of, put_in_pool,
    this_thread,
)
from bfc.allocators._reasons cimport FREES_DEFERRED
from bfc.allocators._source cimport GrowingPool
from bfc.allocators._fences cimport QueuedMark, TakenMark
from bfc.allocators._frees cimport AGAIN, QUERY, RECORD, WAIT, report_unraisable
from bfc.allocators._tags cimport TAG_POOLS, no_mapping
from bfc.allocators.mapping._blocks cimport blocks_of
from bfc.allocators.mapping._expandable cimport ExpandableSegments
from bfc.allocators._plans cimport WHOLE_BESIDE_PLANS, is_beside_plan
from bfc.allocators._chunk_allocator cimport (
    ChunkAllocator, Placement, Request, is_in_capture, note_hit, set_plain_request,
)
from bfc.allocators._captured cimport note_captured_streams
from bfc.allocators._allocator cimport Allocator
from bfc.backings._backing cimport find_in_backings, grow_backing, make_room, release_from_backings
from bfc.backings._pages cimport SMALLEST_PAGE, check_mapping_wanted, may_be_mapped, stitched_pages
from bfc.backings._ranges cimport ranges_of
from bfc.backings._regions cimport regions_beside, sleeping_regions
from bfc.policies._releasing cimport (
    Emptying, choose_enough, choose_oversize, collect_oldest, list_collectable, list_releasable, list_whole,
    take_out,
)

from bfc.errors import never_set_up, out_of_host_memory
from bfc.pytorch.rules import rules_of
from bfc.pytorch.settings import CachingSettings, check_switches, late_fraction
from bfc.units import format_bytes

cdef extern from "torch_sizes.hpp":
    pass


cdef int attach(list attached, function, str kind) except -1:
    if not callable(function):
        raise TypeError(f"{kind} is a function, not {type(function).__name__}")
    attached.append(function)
    return 0


cdef int detach(list attached, function, str kind) except -1:
    if function not in attached:
        raise ValueError(f"{function!r} is not {kind} of this allocator")
    attached.remove(function)
    return 0


@cython.final
@cython.no_gc_clear
cdef class Observers:
    """Free-memory callbacks and out-of-memory observers. They are called without a lock.

    None is called in a thread that is already running one: that one may itself allocate, and be
    refused.
    """

    def __cinit__(self):
        self.callbacks = []
        self.observers = []
        self.rejection_observers = []
        self.running = threading.local()

    cdef int add_callback(self, callback) except -1:
        attach(self.callbacks, callback, "a free-memory callback")
        self.has_callbacks = True
        return 0

    cdef int remove_callback(self, callback) except -1:
        detach(self.callbacks, callback, "a free-memory callback")
        self.has_callbacks = bool(self.callbacks)
        return 0

    cdef int attach(self, observer) except -1:
        return attach(self.observers, observer, "an out-of-memory observer")

    cdef int detach(self, observer) except -1:
        return detach(self.observers, observer, "an out-of-memory observer")

    cdef int attach_to_rejections(self, observer) except -1:
        return attach(self.rejection_observers, observer, "an observer of rejections")

    cdef int detach_from_rejections(self, observer) except -1:
        return detach(self.rejection_observers, observer, "an observer of rejections")

    cdef bint run_callbacks(self) except -1:
        """Calls the callbacks. Returns whether one of them says that it has freed memory."""
        return self.call_each(self.callbacks, ())

    cdef int tell(self, device, uint64_t asked, uint64_t limit, uint64_t device_free) except -1:
        """Tells the observers of a refusal. What they return is ignored."""
        if self.observers:
            self.call_each(self.observers, (device.ordinal, asked, limit, device_free))
        return 0

    cdef int tell_of_rejection(self, device, uint64_t asked, uint64_t taken, uint64_t total) except -1:
        """Tells the observers of a request that was rejected. What they return is ignored."""
        if self.rejection_observers:
            self.call_each(self.rejection_observers, (device.ordinal, asked, taken, total))
        return 0

    cdef bint call_each(self, list functions, tuple arguments) except -1:
        """Calls each function. Returns whether one returned something true. If one raises, that is reported, and the
        next is called."""
        cdef bint freed = False
        if not functions or getattr(self.running, "here", False):
            return False
        self.running.here = True
        try:
            # A copy, since a function may add or remove others.
            for function in list(functions):
                try:
                    # All are called, even after one has freed memory, as upstream does (PyTorch's behaviour, 2.7). What
                    # observers return is not even tested: a user's __bool__ may raise.
                    answer = function(*arguments)
                    freed = (functions is self.callbacks and bool(answer)) or freed
                except Exception as error:
                    report_unraisable(error, function)
        finally:
            self.running.here = False
        return freed


cdef enum:
    MINIMUM_BLOCK = 512
    INTERVALS = 16                      # of TorchSizes
    LARGE_REMAINDER = (1 << 20) + 1     # a large chunk is split where more than 1 MiB is left over


cdef uint64_t smallest_page(sub_allocator) except 0:
    return max(<uint64_t>SMALLEST_PAGE, <uint64_t>sub_allocator.mapping_granularity)


# -- the steps of a miss, and how memory is given back ---------------------------------------------------------------

cdef uint64_t oversize_of(CachingAllocator allocator, settings) except? 0xFFFFFFFFFFFFFFFF:
    """Beside a plan large chunks stay whole: the next step needs them as they are."""
    cdef uint64_t oversize = UNLIMITED if settings.max_split_size is None else settings.max_split_size
    # Another thread may end the plan.
    allocator.acquire()
    cdef cbool planned = is_beside_plan(allocator.pool)
    allocator.lock.release()
    return min(oversize, <uint64_t>WHOLE_BESIDE_PLANS) if planned else oversize


cdef void resolve_collection(CachingAllocator allocator) noexcept nogil:
    cdef uint64_t counted_from = allocator.allowed
    # PyTorch collects nothing without a limit, whatever the threshold: users take it for broken (#106660).
    if counted_from == UNLIMITED and allocator.collect_without_limit:
        counted_from = allocator.total_bytes
    allocator.collects_above = UNLIMITED
    if allocator.threshold > 0 and counted_from != UNLIMITED:
        allocator.collects_above = <uint64_t>(allocator.threshold * <double>counted_from)


cdef cbool answer_for_pages(CachingAllocator allocator, BinSet* answers) noexcept nogil:
    """Writes down the rules of a set of bins whose chunks lie in pages. Returns whether they do."""
    if answers.lane.thread != IN_RANGES:
        answers.is_range = not answers.lane.thread & IN_REGIONS and may_be_mapped(&answers.lane)
        answers.counts_pieces = not answers.is_range
    # Pages need no chunk as a whole: free ones are stitched. Collection leaves ranges alone, as upstream's does.
    if answers.is_range:
        answers.split_remainder = MINIMUM_BLOCK
        answers.oversize = answers.cuts_below = UNLIMITED
        answers.ticks = 0
    return answers.is_range


cdef void search(CachingAllocator allocator, Request* request, Placement* placed) noexcept nogil:
    # Another thread may have freed memory, or closed the allocator, since the last look.
    allocator.acquire()
    if not allocator.life.is_closed:
        allocator.fill(allocator.place(request), request, placed)
    allocator.lock.release()


cdef int grow(CachingAllocator allocator, Request* request, Placement* placed, cbool retry) except -1 nogil:
    """Has the backing of the request grow (PyTorch's behaviour, 2.9)."""
    cdef GrowingPool pool = GrowingPool(request.lane.pool[0], request.lane.pool[1])
    cdef cbool noted = True, private = is_private(&request.lane)
    allocator.acquire()
    # Before any test: alloc_block counts a retry that the limit then refuses, too.
    allocator.recorder.num_alloc_retries += retry
    if private:
        noted = allocator.source.begin_growing(pool)     # so that `join_tag` knows what is not in the pool yet
    allocator.lock.release()
    if not noted:
        placed.handle = NO_HOST_MEMORY
        return 0
    try:
        return grow_backing(allocator, request, placed)
    finally:
        if private:
            # The region is in the pool by now, or did not come.
            allocator.acquire()
            allocator.source.end_growing(pool)
            allocator.lock.release()


cdef cbool rejects(CachingAllocator allocator, Request* request, uint64_t size, uint64_t taken) noexcept nogil:
    """Whether throw_on_cudamalloc_oom refuses a request, since the fraction of the settings has no room for the
    `size` bytes of its region. Then these are not set aside any more."""
    # In this form nothing wraps, however much is taken.
    if size <= allocator.rejects_above and taken <= allocator.rejects_above - size:
        return False
    # What was set aside is given up before another thread finds the limit reached.
    allocator.acquire()
    allocator.source.set_aside -= size
    allocator.recorder.num_oom_rejections += 1
    allocator.lock.release()
    # Nothing else is tried, and no failure is counted (V-9b): rejecting early is what the setting is for.
    request.refused = request.rejected = True
    request.taken = taken
    return True


cdef void borrow(CachingAllocator allocator, Request* request, Placement* placed) noexcept nogil:
    """Looks in the pools that lend to requests which would be refused (PyTorch's behaviour, 2.14)."""
    cdef PoolId pool
    cdef Lane lane
    cdef BinSet rules
    cdef uint32_t found
    cdef ChunkHandle handle
    allocator.acquire()
    # A private pool borrows from no other one (PyTorch's behaviour, 2.14).
    if is_default(pool_of(&request.lane)) and not allocator.life.is_closed:
        for pool in allocator.private_pools.lenders:
            lane = request.lane
            put_in_pool(&lane, pool)
            lane.thread &= ~IN_REGIONS      # a private pool has nothing else
            found = find_lane(allocator.pool, &lane)
            if found == NO_LANE or allocator.tags.tag_of(lane.pool) != 0:   # which sleeps, and the borrower would, too
                continue
            rules = allocator.pool.bin_sets[found + is_large(request.rounded)]
            allocator.answer(&rules, False)      # what lies in ranges is not lent
            handle = allocator.pool.allocate_by(&rules, request.rounded, request.nbytes, request.stream, 0,
                                                request.alignment, request.indexed)
            if handle != NO_CHUNK:
                allocator.fill(handle, request, placed)
                break
    allocator.lock.release()


cdef int collect(CachingAllocator allocator, Request* request) except -1 nogil:
    """Gives back the oldest free regions where more than the threshold is taken (PyTorch's behaviour, 2.8)."""
    cdef vector[ChunkHandle] candidates
    cdef vector[Region] regions
    # The threshold is compared and the regions are taken out at once: no thread is handed one that goes.
    allocator.acquire()
    # No fence is asked and nothing is waited for: upstream collects what is free already.
    cdef cbool collects = allocator.collects_above != UNLIMITED
    cdef uint64_t taken = allocator.pool.counters.pool_bytes
    if taken > allocator.collects_above and list_collectable(allocator.pool, allocator.strict, candidates):
        collect_oldest(allocator.pool, candidates, taken - allocator.collects_above, regions)
        allocator.source.forget(regions)
    allocator.lock.release()
    return release(allocator, request, regions) if collects else 0


cdef int release_oversize(CachingAllocator allocator, Request* request) except -1 nogil:
    """Gives oversize regions of the stream back, so that a new one fits (PyTorch's behaviour, 2.13). Returns
    whether enough went back. What is free in a graph's pool is the graph's: upstream gives it back all the same."""
    cdef vector[Region] regions
    cdef cbool enough, limited
    cdef uint32_t bin_set
    if not allocator.strict and (is_in_capture(allocator, request) or (request.lane.pool[0] and not request.tag)):
        return False
    allocator.acquire()
    limited = allocator.oversize != UNLIMITED
    if limited:
        bin_set = allocator.bin_set_of(request)
        limited = bin_set != NO_LANE and allocator.pool.bin_sets[bin_set].oversize != UNLIMITED  # it is, in pages
    # What was chosen goes back even if it is not enough: upstream has released it by the time it can tell.
    enough = limited and choose_oversize(allocator.pool, bin_set, request.rounded, allocator.oversize, regions)
    allocator.source.forget(regions)
    allocator.lock.release()
    if limited:
        release(allocator, request, regions)
    return enough


cdef int release_and_retry(CachingAllocator allocator, Request* request, Placement* placed) except -1 nogil:
    """Waits for other streams, gives cached regions back, and asks once more (PyTorch's behaviour, 2.5, step 7)."""
    cdef cbool asked = False
    if request.asking.without_gil:
        count_wait(allocator)   # upstream counts it whether there is something to wait for or not
    else:
        wait_for_all(allocator)
    # Off by default: it keeps a cache in pieces, and a recorded run was refused a request with it.
    if allocator.release_only_what_is_needed and release_some(allocator, request):
        grow(allocator, request, placed, True)
        asked = True
    if placed.handle == NO_CHUNK:
        release_all(allocator, request)
        # A request counts one retry, as upstream's: the first of the two attempts is ours.
        grow(allocator, request, placed, not asked)
    return 0


cdef int release_some(CachingAllocator allocator, Request* request) except -1 nogil:
    """Gives back the one region, or the few large ones, whose bytes a new region needs. Returns whether
    any went back."""
    cdef vector[ChunkHandle] chunks, chosen
    cdef vector[Region] regions
    cdef uint64_t needed, taken
    # What is missing, and what goes for it, is chosen at once, and nobody is handed what was chosen.
    allocator.acquire()
    needed = allocator.pool.sizes.segment_for(request.rounded)
    taken = allocator.source.taken()
    # A device that has refused lacks the bytes of a whole segment. At the limit, only what exceeds it has to go.
    if allocator.allowed != UNLIMITED and needed <= allocator.allowed and taken > allocator.allowed - needed:
        needed = taken - (allocator.allowed - needed)
    list_what_may_go(allocator, chunks, may_release_default(allocator))
    choose_enough(allocator.pool, chunks, needed, chosen)
    take_out(allocator.pool, allocator.source, chosen, regions)
    allocator.lock.release()
    release(allocator, request, regions)
    return regions.size() > 0


cdef int release_all(CachingAllocator allocator, Request* request) except -1 nogil:
    cdef vector[ChunkHandle] chunks
    cdef vector[Region] regions
    # PyTorch goes pool by pool, and in each from regions to ranges. Without the GIL ranges stay as they are.
    if not request.asking.without_gil and allocator.segments.are_some():
        empty_in_turn(allocator, &request.asking.changes, may_release_default(allocator))
        return 0
    # Listed and taken out at once, so that nobody is handed one of them. They go back without the lock.
    allocator.acquire()
    list_what_may_go(allocator, chunks, may_release_default(allocator))
    take_out(allocator.pool, allocator.source, chunks, regions)
    allocator.private_pools.drop_empty(allocator.pool, default_pool())
    allocator.source.take_unreturned(regions)
    allocator.lock.release()
    release(allocator, request, regions)
    make_room(allocator, request, allocator.pool.sizes.segment_for(request.rounded))
    return 0


cdef uint64_t empty_in_turn(CachingAllocator allocator, uint64_t* changes,
                            cbool with_default) except? 0xFFFFFFFFFFFFFFFF with gil:
    return allocator.emptying.empty_all(with_default, allocator.strict, changes)


cdef cbool may_release_default(CachingAllocator allocator) noexcept nogil:
    # 2.11 gives nothing of the default pool back while a scope is open anywhere (EX-22).
    return not (allocator.strict and allocator.is_gated())


cdef int release(CachingAllocator allocator, Request* request, vector[Region]& regions) except -1 nogil:
    """Returns what the pool has forgotten on behalf of a request."""
    allocator.source.give_back(regions, request.asking.without_gil)
    request.asking.changes += regions.size()
    return 0


cdef uint64_t release_whole(CachingAllocator allocator, cbool with_default) except? 0xFFFFFFFFFFFFFFFF:
    cdef vector[ChunkHandle] chunks
    cdef vector[Region] regions
    cdef uint64_t released
    # Listed and taken out at once, so that nobody is handed one of them. They go back without the lock.
    allocator.acquire()
    list_what_may_go(allocator, chunks, with_default)
    released = allocator.source.unreturned.nbytes + take_out(allocator.pool, allocator.source, chunks, regions)
    allocator.private_pools.drop_empty(allocator.pool, default_pool())
    allocator.source.take_unreturned(regions)
    allocator.lock.release()
    allocator.source.give_back(regions, False)
    return released


cdef void list_what_may_go(CachingAllocator allocator, vector[ChunkHandle]& out, cbool with_default) noexcept nogil:
    list_releasable(allocator.pool, allocator.private_pools, with_default, out)


cdef int run_callbacks(CachingAllocator allocator) except -1 with gil:
    return allocator.observers.run_callbacks()


cdef void count_wait(CachingAllocator allocator) noexcept nogil:
    # Callers without the GIL count here, too.
    allocator.acquire()
    allocator.recorder.num_sync_all_streams += 1
    allocator.lock.release()


cdef int wait_for_all(CachingAllocator allocator) except -1 with gil:
    count_wait(allocator)
    return allocator.frees.drain(RECORD | QUERY | AGAIN | WAIT)      # also what the device failed for before


cdef uint64_t empty_one_pool(CachingAllocator allocator, PoolId id) except? 0xFFFFFFFFFFFFFFFF:
    cdef vector[ChunkHandle] chunks
    cdef vector[Region] regions
    cdef uint64_t released
    if allocator.segments.are_some():
        return allocator.emptying.empty_pool(id)
    # Listed and taken out at once, so that nobody is handed one of them. They go back without the lock.
    allocator.acquire()
    list_whole(allocator.pool, id, SMALL, chunks)
    list_whole(allocator.pool, id, LARGE, chunks)
    released = take_out(allocator.pool, allocator.source, chunks, regions)
    allocator.private_pools.drop_empty(allocator.pool, id)
    allocator.lock.release()
    allocator.source.give_back(regions, False)
    return released


cdef int wait_for_pool(CachingAllocator allocator, PoolId id) except -1:
    """Waits for the streams that still use a pool's freed memory, and for no others."""
    # What a scope has put off gets its fences first, so that they are among those that are listed.
    allocator.frees.drain(RECORD)
    cdef vector[QueuedMark] marks
    cdef QueuedMark mark
    cdef TakenMark taken
    allocator.fences.list_marks(marks)
    for mark in marks:
        if is_of_pool(allocator, mark.handle, id) and allocator.fences.wait_for(mark, &taken):
            allocator.frees.finish_mark(&taken)
    return 0


cdef cbool is_of_pool(CachingAllocator allocator, ChunkHandle handle, PoolId id) noexcept:
    # A lane that another thread opens moves the sets of bins.
    allocator.acquire()
    cdef Lane lane = allocator.pool.bin_sets[allocator.pool.chunks[handle].bin_set].lane
    allocator.lock.release()
    return is_same_pool(pool_of(&lane), id)


@cython.no_gc_clear
cdef class CachingAllocator(Allocator):
    """PyTorch's caching allocator: free memory is kept by stream, small and large chunks apart.

    Parameters
    ----------
    sub_allocator : SubAllocator
        Where segments come from, such as `bfc.CUDASubAllocator()`.
    memory_limit : int, str or float, optional
        The most bytes to take from it: a number, a text such as "4 GiB", or a float up to 1.0,
        which is PyTorch's memory fraction. None is `per_process_memory_fraction`; if that is not
        set either, only the sub-allocator limits it.
    settings : str or CachingSettings, optional
        What PyTorch takes in PYTORCH_CUDA_ALLOC_CONF, such as "max_split_size_mb:128".
        `bfc.CachingSettings.from_environment()` reads BFC_ALLOC_CONF.
    strict : bool, optional
        Place, refuse and count exactly as PyTorch does.
    torch : str, optional
        The version of PyTorch whose rules it follows: "2.15", or "2.11". What sets them apart is in
        docs/behaviour/pytorch.md. Independent of `strict`.
    stream : int, stream object or None, optional
        The stream that the allocator belongs to: the default of `allocate`.
    retry_seconds : float, optional
        How long a request that does not fit waits for other threads to free memory.
    max_split_size_mb : int, optional
        PyTorch's setting of that name, as a value. It takes precedence over the text of `settings`,
        and so do the five parameters below.
    max_non_split_rounding_mb : int, optional
        PyTorch's setting.
    garbage_collection_threshold : float, optional
        PyTorch's setting.
    roundup_power2_divisions : int or mapping, optional
        PyTorch's setting: a number of divisions for all sizes, or {MiB: divisions, ">": divisions}.
    large_segment_size_mb : int, optional
        PyTorch's setting.
    per_process_memory_fraction : float, optional
        PyTorch's setting. Cannot be given together with `memory_limit`.
    search_again : bool, optional
        After the last retry, which waits for other streams, look once more at the memory that they
        gave back (upstream #189504). On unless `strict`.
    collect_without_limit : bool, optional
        If there is no limit, `garbage_collection_threshold` is a fraction of the device's total.
        Upstream ignores the threshold then, so that placement may differ once it collects. On
        unless `strict`.
    release_only_what_is_needed : bool, optional
        The last retry gives back as much cached memory as the request needs, and everything only if
        that does not help. It saves driver calls, but the rest of the cache may be fragmented, and
        a later request may be refused because of that. Off by default.
    stitch : bool, optional
        Map memory page by page instead of taking segments, and stitch free pages that lie apart where
        no free block is large enough. Sizes are rounded, streams and private pools kept apart, and
        counts kept as in PyTorch; blocks are always split. Private pools take segments as before,
        since a captured graph needs its addresses. Cannot be combined with `strict` or
        `expandable_segments`, and the settings about segments do nothing to what is mapped.
    page_size : int or str, optional
        With `stitch`, the bytes of a page: a power of two, and a multiple of the source's
        `mapping_granularity`. None is 2 MiB, or the granularity if that is more.
    plan : Plan, optional
        A plan to serve: see `use_plan`. Beside a plan free blocks from 32 MiB on stay whole, as with
        `max_split_size_mb=32`. With `stitch` the plan lies in pages, and lends those that it leaves idle.

    Attributes
    ----------
    search_again : bool
        True if it is on.
    collect_without_limit : bool
        True if it is on.
    release_only_what_is_needed : bool
        True if it is on.
    stitch : bool
        As given.
    torch : str
        As given.

    Raises
    ------
    SettingsError
        If `settings`, or one of the six settings, is unknown, malformed or out of range.
    TypeError
        If `sub_allocator` is not a SubAllocator, or another argument has the wrong type.
    ValueError
        If another argument is out of its range, bfc does not have the rules of the version `torch`,
        `stream` cannot be the stream of an allocator, both `memory_limit` and
        `per_process_memory_fraction` are given, or `stitch` is given together with `strict`,
        `expandable_segments`, or a source that cannot map memory.

    Notes
    -----
    Any thread may use it. Source: `c10::cuda::CUDACachingAllocator` of PyTorch 2.11 and 2.15;
    docs/design/differences.md lists where it differs on purpose.

    Examples
    --------
    >>> import bfc
    >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), settings="max_split_size_mb:64")
    >>> buffer = allocator.allocate("5 MiB")
    >>> allocator.stats().pool_bytes
    20971520
    """

    def __cinit__(self, *args, **kwargs):
        self.segments = ExpandableSegments()
        self.segments.attach(&self.lock, self.pool, self.source, self.fences, self.tags)
        self.mapped = self.segments
        self.observers = Observers()
        self.emptying = Emptying()
        self.emptying.attach(&self.lock, self.pool, self.source, self.private_pools, self.segments)
        self.first_max_split_size = -1
        self.allowed = self.collects_above = self.rejects_above = self.oversize = UNLIMITED

    def __init__(self, sub_allocator, *, memory_limit=None, settings="", strict=False, torch="2.15", stream=0,
                 retry_seconds=0.0, max_split_size_mb=None, max_non_split_rounding_mb=None,
                 garbage_collection_threshold=None, roundup_power2_divisions=None, large_segment_size_mb=None,
                 per_process_memory_fraction=None, search_again=None, collect_without_limit=None,
                 release_only_what_is_needed=None, stitch=False, page_size=None, plan=None):
        if not 0 <= retry_seconds < math.inf:
            raise ValueError(f"retry_seconds is a number of seconds from 0 on, not {retry_seconds}")
        self.rules = rules_of(torch)
        check_switches(strict=strict, search_again=search_again, collect_without_limit=collect_without_limit,
                       release_only_what_is_needed=release_only_what_is_needed)
        check_mapping_wanted(sub_allocator, "stitch", stitch, strict, "PyTorch")
        if page_size is not None and not stitch:
            raise ValueError("page_size is for stitch=True")
        if memory_limit is not None and per_process_memory_fraction is not None:
            raise ValueError("memory_limit and per_process_memory_fraction both set the limit: give one of them")
        if not isinstance(settings, CachingSettings):
            settings = CachingSettings().apply(settings, strict=strict, torch=torch)
        settings.check_version(torch)
        settings = settings.with_options(
            max_split_size_mb=max_split_size_mb, max_non_split_rounding_mb=max_non_split_rounding_mb,
            garbage_collection_threshold=garbage_collection_threshold,
            roundup_power2_divisions=roundup_power2_divisions, large_segment_size_mb=large_segment_size_mb,
            per_process_memory_fraction=per_process_memory_fraction)
        # 1.0 is all of the device, and 1 is one byte. PyTorch's fractions are floats, too.
        is_fraction = isinstance(memory_limit, float) and 0.0 < memory_limit <= 1.0
        self.set_up(sub_allocator, None if is_fraction else memory_limit, stream, strict)
        self.pool.use_lanes()
        self.pool.order.prefers_older = self.rules.by_registration and not stitch
        self.streams.by_stream = self.streams.home != HOST_STREAM
        # A free never asks: PyTorch's process_events runs at allocations only.
        self.fences.asks_later = True
        self.fences.strict = strict
        self.scopes_gate = self.rules.scopes_gate
        if self.scopes_gate:
            self.fences.open_scopes = &self.private_pools.open_scopes
        # A segment of PyTorch's is one cudaMalloc, also if two lie end to end.
        self.source.joins_regions = False
        self.source.alignment = max(self.source.alignment, <uint64_t>MINIMUM_BLOCK)
        self.pool.sizes.granularity = self.source.alignment
        if sub_allocator.largest_block is not None:
            self.pool.sizes.largest_segment = sub_allocator.largest_block
        self.set_up_memory(stitch, page_size)
        self.segments.strict = strict
        self.segments.checks_range = self.rules.checks_range
        self.retry_seconds = retry_seconds
        self.search_again = not strict if search_again is None else search_again
        self.collect_without_limit = not strict if collect_without_limit is None else collect_without_limit
        self.release_only_what_is_needed = bool(release_only_what_is_needed)
        self.total_bytes = sub_allocator.total_bytes
        self.apply(settings)
        if self.oversize != UNLIMITED:
            # memory_stats() goes on to show the value that the allocator was made with: upstream copies it once.
            self.first_max_split_size = <int64_t>self.oversize
        if is_fraction or memory_limit is None:
            self.set_memory_fraction(settings.per_process_memory_fraction if memory_limit is None else memory_limit)
        else:
            self.set_allowed(self.limit)
        self.life.is_closed = False
        if plan is not None:
            self.use_plan(plan)

    cdef int set_up_memory(self, bint stitch, page_size) except -1:
        """Says where requests find memory, and which of it grows."""
        if stitch:
            mapped = stitched_pages(self, smallest_page(self.sub_allocator) if page_size is None else page_size, 0.0)
            self.stitching.highest_limit = max(self.limit, self.sub_allocator.allocation_limit(),
                                               self.sub_allocator.total_bytes)
            self.pool.features |= OPTIONS
        else:
            mapped = ranges_of(self.segments)
        self.backings = (sleeping_regions(self.mapped), mapped, regions_beside(IN_REGIONS if stitch else 0))
        return 0

    def __repr__(self):
        limit = "no limit" if self.allowed == UNLIMITED else f"limit {format_bytes(self.allowed)}"
        return f"<bfc.CachingAllocator, {limit}{self.mapped.in_words()}, on {self.sub_allocator!r}>"

    @property
    def torch(self):
        """The version of PyTorch whose rules it follows, such as "2.15"."""
        if self.rules is None:
            raise never_set_up()
        return self.rules.version

    @property
    def stitch(self):
        """True if memory is mapped page by page."""
        return self.stitching is not None

    # -- settings -----------------------------------------------------------------------------------------------------

    @property
    def settings(self):
        """The settings' text that was applied last, as PyTorch remembers it."""
        return self.settings_now().text

    def set_settings(self, text):
        """Apply new settings, as `torch.cuda.memory._set_allocator_settings` does.

        Parameters
        ----------
        text : str
            What PyTorch takes in PYTORCH_CUDA_ALLOC_CONF. The settings that any text resets return to
            their defaults unless it names them (see `CachingSettings.apply`).

        Raises
        ------
        SettingsError
            If the text is malformed, or changes `per_process_memory_fraction`, which is read only when
            an allocator is made (use `set_memory_fraction`; with `strict` it is ignored, as in PyTorch).
            Nothing has changed then.
        TypeError
            If `text` is not a str.

        Notes
        -----
        Source: PyTorch's behaviour, 2.18.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.set_settings("roundup_power2_divisions:4")
        >>> address = allocator.allocate_raw(84 << 20)
        >>> allocator.allocated_size(address) >> 20
        96
        """
        settings = self.settings_now().apply(text, strict=self.strict, torch=self.rules.version)
        if not self.strict and settings.per_process_memory_fraction != self.applied.per_process_memory_fraction:
            # In PyTorch the limit follows this key only where a device's allocator is made: said, rather than ignored.
            raise late_fraction(settings.per_process_memory_fraction)
        self.apply(settings)

    cdef int apply(self, settings) except -1:
        settings = replace(settings)    # checked again: an unpickled one was not
        # Whatever may refuse stands above all that changes. Upstream applies what it has read before a mistake.
        self.mapped.check_settings(settings)
        cdef int i
        cdef uint64_t oversize = oversize_of(self, settings)
        cdef uint64_t slack = settings.max_non_split_rounding
        cdef double threshold = settings.garbage_collection_threshold
        cdef TorchSizes sizes = self.pool.sizes
        sizes.large_segment = settings.large_segment_size
        sizes.divides = False
        for i in range(INTERVALS):
            sizes.division_bits[i] = max(0, settings.roundup_power2_divisions[i].bit_length() - 1)
            sizes.divides = sizes.divides or sizes.division_bits[i] > 0
        self.applied = settings
        self.segments.wanted_reserve = settings.expandable_segments_reserve
        self.fences.reuses = settings.graph_capture_record_stream_reuse
        # Requests of other threads are placed by the old settings or by the new ones, and by no mixture.
        self.acquire()
        self.pool.sizes = sizes
        self.rejects_above = UNLIMITED
        if settings.throw_on_cudamalloc_oom:
            # That of the settings and not one set by a call: alloc_block reads the configured fraction.
            self.rejects_above = <uint64_t>(<double>settings.per_process_memory_fraction * <double>self.total_bytes)
        self.expands = self.segments.is_on = settings.expandable_segments
        self.oversize = oversize
        self.oversize_slack = slack
        self.threshold = threshold
        resolve_collection(self)
        self.answer_all()
        self.lock.release()
        return 0

    cdef int pool_ended(self, pool) except -1:
        """PyTorch since 2.12 frees here what was put off of the pool, if the graph's structure is looked at."""
        if self.fences.reuses and not self.scopes_gate:
            return self.frees.record_deferred_of(tuple(pool))
        return 0

    cdef int pool_released(self, pool) except -1:
        if self.rules.forgets_unsplit:
            # Up to 2.13 the id stays in no_split_pools, and a later pool of that id does not split either (V-4).
            self._set_no_split(pool, False)
        return 0

    cdef int plan_changed(self) except -1:
        cdef uint64_t oversize = oversize_of(self, self.applied)
        # Each set of bins has the new rules before another request looks at one.
        self.acquire()
        self.oversize = oversize
        self.answer_all()
        self.lock.release()
        return 0

    def set_memory_fraction(self, fraction):
        """Limit the allocator to a fraction of the device's total memory.

        Parameters
        ----------
        fraction : float
            From 0.0 to 1.0; 1.0 removes the limit. Memory above the new limit is not given back.

        Raises
        ------
        TypeError
            If `fraction` is not a float.
        ValueError
            If `fraction` is not between 0.0 and 1.0.

        Notes
        -----
        Source: PyTorch's behaviour, 2.14.
        """
        if not isinstance(fraction, float):
            raise TypeError(f"a memory fraction is a float, not {type(fraction).__name__}")
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"a memory fraction lies between 0.0 and 1.0, not {fraction}")
        self.require_set_up()
        cdef double limit = fraction * <double>self.total_bytes
        cdef uint64_t whole = <uint64_t>limit
        # From 2.13 on to the nearest, halves away from zero (V-3). Before, the fraction is cut off.
        if self.rules.rounds_limit and limit - <double>whole >= 0.5:
            whole += 1
        # As upstream: 1.0 takes an earlier limit away, and leaves it to the driver to refuse.
        self.set_allowed(UNLIMITED if fraction == 1.0 else whole)

    @property
    def memory_fraction(self):
        """The limit as a fraction of the device's total memory; 1.0 if there is no limit."""
        self.require_set_up()
        has_limit = self.allowed != UNLIMITED and self.total_bytes > 0
        return <double>self.allowed / <double>self.total_bytes if has_limit else 1.0

    cdef int set_allowed(self, uint64_t allowed) except -1:
        cdef uint64_t limit = self.sub_allocator.allocation_limit() if allowed == UNLIMITED else allowed
        self.acquire()
        self.allowed = allowed
        self.limit = limit
        self.mapped.set_limit(limit, allowed)
        self.frees.count.add(1)         # so that threads that wait for memory look again
        resolve_collection(self)
        # Only then are the rules written into the sets of bins, which is all that the fast path reads.
        self.answer_all()
        self.lock.release()
        return 0

    cdef object settings_now(self):
        if self.applied is None:
            raise never_set_up()
        return self.applied

    cdef object torch_now(self):
        return self.rules.version

    cdef void set_rules(self, uint32_t lane) noexcept nogil:
        """Calls `answer` for a lane's sets of bins, and for those of its ranges."""
        cdef uint32_t i
        for i in range(lane, lane + 2):
            self.answer(&self.pool.bin_sets[i], self.expands)
            if self.pool.bin_sets[i].ranges:
                self.answer(&self.pool.bin_sets[self.pool.bin_sets[i].ranges], self.expands)

    cdef void answer(self, BinSet* answers, cbool expands) noexcept nogil:
        """Writes down what the policy decides for a set of bins, as data for the pool."""
        cdef PoolId pool = pool_of(&answers.lane)
        if answers.is_plan:
            return
        if self.stitching is not None and answer_for_pages(self, answers):
            return
        # should_split looks at the option and not at the chunk: an ordinary one is split to 512 bytes, too, while it is
        # on.
        answers.split_remainder = MINIMUM_BLOCK if answers.kind == SMALL or expands else LARGE_REMAINDER
        answers.looks_in_ranges = expands and answers.ranges != 0
        if is_among(pool, self.private_pools.unsplit):
            answers.split_remainder = UNLIMITED
        answers.oversize = self.oversize
        answers.cuts_below = UNLIMITED if expands else self.oversize
        answers.oversize_slack = self.oversize_slack
        answers.ticks = self.collects_above != UNLIMITED and answers.kind == LARGE and is_default(pool)

    cdef void answer_all(self) noexcept nogil:
        cdef uint32_t i
        if self.oversize != UNLIMITED or self.collects_above != UNLIMITED or self.expands:
            self.pool.features |= OPTIONS
        for i in range(<uint32_t>self.pool.bin_sets.size()):
            self.answer(&self.pool.bin_sets[i], self.expands)

    # -- what this policy overrides -----------------------------------------------------------------------------------

    cdef uint64_t alignment_for(self, uint64_t alignment) except? 0xFFFFFFFFFFFFFFFF:
        if self.strict and alignment > self.source.alignment:
            raise ValueError(f"PyTorch's allocator has addresses at multiples of {self.source.alignment}, and knows no "
                             f"other alignment than that: {alignment} needs strict=False")
        return ChunkAllocator.alignment_for(self, alignment)

    cdef cbool hit(self, uint64_t nbytes, uint64_t stream, Placement* placed) noexcept nogil:
        cdef Lane lane = Lane([0, 0], stream, 0)
        # Before the size is rounded, which wraps for the largest. PyTorch's raw_alloc does not test it.
        if nbytes >= TOO_LARGE:
            return False
        # Without scopes and without streams of threads the lane is the stream's in the default pool.
        if self.private_pools.open_scopes.get() or (self.streams.of_threads.size() and self.is_of_thread(stream)):
            self.set_lane(&lane, stream)
            if self.private_pools.may_have_joined(stream):
                return False    # `look_at_captures` asks
            if self.tags.asleep_with(lane.pool) != 0:
                return False
        return note_hit(self.pool, self.pool.allocate_in_lane(&lane, nbytes), placed)

    cdef void set_request(self, Request* request, uint64_t nbytes, uint64_t stream) noexcept nogil:
        set_plain_request(request, nbytes, nbytes, stream)
        request.refused = nbytes >= TOO_LARGE
        if not request.refused:
            request.rounded = self.pool.sizes.round(nbytes)
        request.has_waited = True   # the retry waits for other streams, when its turn comes

    @cython.final
    cdef void set_lane(self, Lane* lane, uint64_t stream) noexcept nogil:
        lane.pool[0] = lane.pool[1] = lane.thread = 0
        lane.stream = stream if self.streams.by_stream else self.streams.home
        if self.streams.of_threads.size() and self.is_of_thread(stream):
            lane.thread = this_thread()
        if self.private_pools.open_scopes.get():
            self.private_pools.divert(lane, stream, default_pool())

    @cython.final
    cdef uint32_t bin_set_of(self, Request* request) noexcept nogil:
        cdef uint32_t lane = find_lane(self.pool, &request.lane)
        if lane == NO_LANE:
            lane = self.pool.open_lane(&request.lane)
            if lane == NO_LANE:
                return NO_LANE
            self.set_rules(lane)
        return lane + is_large(request.rounded)

    cdef ChunkHandle place(self, Request* request) noexcept nogil:
        self.set_lane(&request.lane, request.stream)
        if request.captured[0] or request.captured[1]:
            self.private_pools.divert(&request.lane, request.stream, PoolId(request.captured[0], request.captured[1]))
        if request.tag:
            if self.tags.is_asleep(request.tag):
                return NO_CHUNK
            put_in_pool(&request.lane, PoolId(TAG_POOLS, request.tag))
        # A private pool may sleep with a tag that this request is not in.
        elif self.tags.asleep_with(request.lane.pool) != 0:
            return NO_CHUNK
        return find_in_backings(self, request)

    cdef ChunkHandle find(self, Request* request) noexcept nogil:
        cdef uint32_t bin_set
        cdef BinSet rules
        if not request.contiguous:
            return ChunkAllocator.find(self, request)
        bin_set = self.bin_set_of(request)
        if bin_set == NO_LANE:
            return NO_HOST_MEMORY
        rules = self.rules_for(request, bin_set)
        return self.pool.allocate_by(&rules, request.rounded, request.nbytes, request.stream, 0, request.alignment,
                                     request.indexed)

    cdef BinSet rules_for(self, Request* request, uint32_t bin_set) noexcept nogil:
        cdef BinSet rules = self.pool.bin_sets[bin_set]
        if request.contiguous:
            self.answer(&rules, False)      # not among what is mapped
        return rules

    cdef ChunkHandle find_in_new_region(self, Request* request, Region* region) noexcept nogil:
        """A new region serves the request that it was taken for, whatever else would fit by now (PyTorch's
        behaviour, 2.9)."""
        cdef ChunkHandle handle = self.pool.regions[region.end].first
        if self.pool.chunks[handle].size < request.rounded:
            return NO_CHUNK     # the sub-allocator gave less
        if not self.private_pools.know(pool_of(&request.lane)):
            return NO_HOST_MEMORY
        # Not the best fit, which a free of another thread may have made meanwhile: alloc_block returns its own block.
        return self.pool.allocate_this(handle, request.rounded, request.nbytes, request.stream, request.indexed)

    cdef int place_after_miss(self, Request* request, Placement* placed) except -1 nogil:
        """The order of attempts is upstream's (PyTorch's behaviour, 2.5)."""
        if request.tag:
            self.tags.refuse_if_asleep(request.tag)
        elif self.source.has_blocks and request.asking.without_gil:     # it can raise nothing
            request.refused = request.refused or self.tags.find_asleep_with(request.lane.pool) != 0
        elif self.source.has_blocks:
            self.tags.refuse_if_pool_sleeps(request.lane.pool)
        if request.refused:
            return 0
        if self.observers.has_callbacks and not request.asking.without_gil and run_callbacks(self):
            search(self, request, placed)
        if placed.handle == NO_CHUNK:
            collect(self, request)
            grow(self, request, placed, False)
        # Upstream raises an error of the driver at once, with no retry.
        if request.asking.fault or request.refused:
            return 0    # a driver that fails is not out of memory
        if placed.handle == NO_CHUNK:
            borrow(self, request, placed)
        if placed.handle == NO_CHUNK and release_oversize(self, request):
            grow(self, request, placed, False)
        if placed.handle == NO_CHUNK and not self.is_gated() and not is_in_capture(self, request):
            release_and_retry(self, request, placed)
        return 0

    cdef int place_where_refused(self, Request* request, Placement* placed) except -1 nogil:
        """Makes the retry that an open scope has suppressed, and then searches what that has freed once more."""
        if request.asking.fault:
            return 0
        # Before it is refused and not earlier, so that placement stays PyTorch's up to its first refusal.
        if not self.strict and self.is_gated() and not is_in_capture(self, request):
            release_and_retry(self, request, placed)
        if placed.handle == NO_CHUNK and self.search_again:
            search(self, request, placed)
        return 0

    cdef uint64_t set_aside_for(self, Request* request) noexcept nogil:
        self.acquire()
        cdef uint64_t size = self.pool.sizes.segment_for(request.rounded)   # settings change under the lock
        cdef uint64_t taken = self.source.taken()
        cdef cbool fits = self.source.set_bytes_aside(size, self.allowed, &request.blocked)
        self.lock.release()
        return size if fits and not rejects(self, request, size, taken) else 0

    cdef int add_region(self, Request* request, Placement* placed) except -1 nogil:
        cdef Region block
        cdef uint64_t size = self.set_aside_for(request)
        if size and self.source.ask(&request.asking, size, &block, True):
            self.take_region(request, placed, &block)
        return 0

    cdef int join_tag(self, Request* request, PoolId pool) except -1:
        cdef uint64_t[2] name = [pool.first, pool.second]
        cdef GrowingPool growing = GrowingPool(pool.first, pool.second)
        if not self.sub_allocator.supports_virtual_memory:
            raise no_mapping(self)
        blocks_of(self.mapped)
        # Whether the pool has memory, and which tag it belongs to, is decided at once: no region comes in between.
        self.acquire()
        cdef uint64_t joined = self.tags.tag_of(name)
        cdef cbool used = joined != request.tag and (holds_memory(self.pool, pool) or self.source.is_growing(growing))
        cdef cbool added = joined == request.tag or used or self.tags.join(pool, request.tag)
        self.lock.release()
        if used:
            where = f"tag {self.tags.name_of_pool(TAG_POOLS, joined)!r}" if joined else "no tag"
            wanted = self.tags.name_of_pool(TAG_POOLS, request.tag)
            raise RuntimeError(f"private pool {(pool.first, pool.second)} has memory of {where}, and cannot belong to "
                               f"tag {wanted!r} as well: give the tag a pool of its own")
        if not added:
            raise out_of_host_memory()
        request.tag = 0     # it lies in the private pool
        return 0

    cdef cbool is_gated(self) noexcept nogil:
        """Whether no events are polled, frees of memory that other streams use are put off, and no request is tried
        again: in PyTorch 2.11, while any scope is open, on any thread or stream (PyTorch's behaviour, 0.3). Without
        `strict` events are polled if a request would be refused or a user asks for memory to be given back."""
        return self.scopes_gate and self.private_pools.open_scopes.get() > 0

    # -- giving regions back ------------------------------------------------------------------------------------------

    cdef str refused_by(self, Request* request):
        if request.rejected:
            return (f"throw_on_cudamalloc_oom:True, with {format_bytes(request.taken)} reserved: it rejects a request "
                    f"before the device is asked and before anything is given back")
        if self.segments.refuses(request.rounded, self.total_bytes):
            reserve = format_bytes(self.segments.bytes_to_reserve(self.total_bytes))
            return (f"expandable_segments_reserve, with {reserve} for a segment: a larger reserve would "
                    f"hold the request")
        return ChunkAllocator.refused_by(self, request)

    cdef object against_pieces(self):
        return self.mapped.against_pieces() if self.sub_allocator.supports_virtual_memory else ""

    def release_free_regions(self):
        """Give every wholly free region back, after waiting for the streams that use freed memory.

        The regions of a private pool are given back only after the pool was released. While the stream of
        this thread captures a graph, only those are given back, and nothing is waited for.

        Returns
        -------
        int
            The bytes given back.

        Raises
        ------
        SubAllocatorError
            If the sub-allocator fails to take a region back. It is offered again by the next call of
            `release_free_regions` or `close`.

        Notes
        -----
        Source: `empty_cache`, PyTorch's behaviour, 2.13.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.deallocate_raw(allocator.allocate_raw(100))
        >>> allocator.release_free_regions()
        2097152
        """
        cdef uint64_t changes = 0
        cdef bint captures = self.fences.is_in_capture(self.streams.home)
        # In a capture only released pools are emptied (V-2l): waiting for streams would spoil it.
        cdef cbool with_default = may_release_default(self) and not captures
        if not captures and not (self.strict and self.is_gated()):
            wait_for_all(self)
            self.frees.drain(QUERY | AGAIN)
        note_captured_streams(self)
        cdef int64_t mark = self.recorder.mark_release(self.pool, self.lock)
        cdef uint64_t released
        cdef Release before = self.pool.begin_release(mark)
        try:
            if self.segments.are_some():
                return empty_in_turn(self, &changes, with_default)
            released = release_whole(self, with_default)
            if self.planned is not None:
                self.planned.give_back_empty()
            return released + (0 if captures else self.release_mapped())
        finally:
            self.pool.end_release(before)

    cdef uint64_t release_mapped(self) except? 0xFFFFFFFFFFFFFFFF:
        return release_from_backings(self)

    # -- streams ------------------------------------------------------------------------------------------------------

    cdef bint plays_alone(self) except -1:
        return not self.reasons.has(FREES_DEFERRED) and not self.observers.has_callbacks

    cdef int was_refused(self, Request* request) except -1:
        if request.rejected:
            return self.observers.tell_of_rejection(self.device, self.pool.sizes.segment_for(request.rounded),
                                                    request.taken, self.total_bytes)
        if request.refused:
            return 0
        # With no lock held: a sub-allocator is a user's code, which may allocate here.
        device_free, total = self.memory_of_device()
        self.recorder.note_refusal(self.pool, self.lock, request.rounded, device_free, &request.lane, request.owner)
        return self.observers.tell(self.device, self.pool.sizes.segment_for(request.rounded),
                                   total if self.allowed == UNLIMITED else self.allowed, device_free)

    # -- statistics ----------------------------------------------------------------------------------------------------

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
        if self.pool.books.usage == NULL:
            raise never_set_up()
        self.frees.drain(0)
        return self.recorder.stats(self.pool, self.lock, self.first_max_split_size,
                                   TAG_POOLS if self.rules.counts_private_pools else 0)

    def page_stats(self):
        """What expandable segments have reserved and mapped, and what did not go back.

        Returns
        -------
        dict of str to int
            With `stitch`, what `BFCAllocator.page_stats` returns. Otherwise, and all 0 if nothing was ever
            mapped:

            - `"reservations"` and `"reserved_address_bytes"`: the ranges of addresses.
            - `"pages"` and `"page_bytes"`: the memory for them, 2 MiB or `large_segment_size_mb` a page.
              `"lost_bytes"` are part of it.
            - `"lost_slots"`: pages that the sub-allocator failed to unmap. They are not handed out.
              `release_free_regions` and `close` try again.
            - `"lost_bytes"`: the memory of those, and of pages that it unmapped and failed to release.

        Raises
        ------
        ClosedError
            If the allocator's `__init__` has not finished.

        Notes
        -----
        Cost: O(n) in the pages, no device call. While another thread maps or unmaps, the figures may be
        those of a moment in between, and `"lost_slots"` does not count.

        Examples
        --------
        >>> import bfc
        >>> device = bfc.SimulatedSubAllocator("1 GiB")
        >>> allocator = bfc.CachingAllocator(device, settings="expandable_segments:True")
        >>> address = allocator.allocate_raw(25 << 20)
        >>> stats = allocator.page_stats()
        >>> stats["pages"], stats["page_bytes"] >> 20, stats["reserved_address_bytes"] >> 20
        (2, 40, 1160)
        """
        if self.pool.books.usage == NULL:
            raise never_set_up()
        return self.mapped.stats()

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
        from bfc.snapshots.summary import summary

        return summary(self.memory_stats(), str(self.device), abbreviated)

    def reset_accumulated_stats(self):
        """Restart the counts that only rise from 0. Current values and peaks stay."""
        Allocator.reset_accumulated_stats(self)
        # Callers without the GIL count here, too.
        self.acquire()
        self.recorder.restart_counts()
        self.lock.release()

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
        self.observers.add_callback(callback)

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
        self.observers.remove_callback(callback)

    def attach_oom_observer(self, observer):
        """Call a function before OutOfMemoryError is raised, or `try_allocate` returns None.

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
        self.observers.attach(observer)

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
        self.observers.detach(observer)

    def attach_oom_rejection_observer(self, observer):
        """Call a function when `throw_on_cudamalloc_oom` refuses a request without asking the device.

        Parameters
        ----------
        observer : callable
            Called without a lock as `observer(ordinal, asked, reserved, total)`: the device's ordinal,
            the bytes that would be asked of it, those reserved, and the device's total. It is called in the
            thread of the request; PyTorch starts a thread for it. An exception is reported through
            `sys.unraisablehook`. Requests that are refused while it runs call no observer.

        Raises
        ------
        TypeError
            If `observer` is not callable.

        Notes
        -----
        Source: `attachOomRejectionObserver` of PyTorch 2.12 and later.
        """
        self.observers.attach_to_rejections(observer)

    def detach_oom_rejection_observer(self, observer):
        """Remove a function that was given to `attach_oom_rejection_observer`.

        Parameters
        ----------
        observer : callable
            The function.

        Raises
        ------
        ValueError
            If it was not attached.
        """
        self.observers.detach_from_rejections(observer)

    # -- private pools, for `bfc.MemPool` -----------------------------------------------------------------------------

    def _create_pool(self, pool, use_on_oom=False, no_split=False):
        """Makes a private pool, or adds a reference to it."""
        self.captures.pool_uses.add_reference(id_of(pool))
        try:
            if use_on_oom:
                self._set_use_on_oom(pool)
            if no_split:
                self._set_no_split(pool)
        except BaseException:
            self._set_use_on_oom(pool, False)
            self.release_pool(pool)
            raise

    def _set_use_on_oom(self, pool, use=True):
        """Sets whether a pool serves requests that would be refused."""
        self.captures.pool_uses.set_among(&self.private_pools.lenders, id_of(pool), use)

    def _set_no_split(self, pool, no_split=True):
        """Sets whether a pool's chunks are handed out whole."""
        cdef PoolId id = id_of(pool)
        cdef bint wanted = bool(no_split)
        # Other threads put pools on this list, too.
        self.acquire()
        cdef bint changes = is_among(id, self.private_pools.unsplit) != wanted
        self.lock.release()
        if not changes:
            return
        self.captures.pool_uses.set_among(&self.private_pools.unsplit, id_of(pool), no_split)
        # The rules of all sets change before another request is placed.
        self.acquire()
        self.answer_all()
        self.lock.release()

    def _empty_pool(self, pool, or_later=False):
        """Gives back what a released pool caches, after waiting for the streams that use its memory. Does nothing if
        the pool still has a reference. Returns the bytes given back. `or_later`: where that cannot be done now (in a
        capture, or as `strict` has it), leave it to the next `empty_cache`."""
        cdef PoolId id = id_of(pool)
        cdef Release before
        # A reference that another thread takes from here on keeps the pool, but not what it caches.
        self.acquire()
        cdef bint is_free = self.private_pools.uses(id) == 0
        self.recorder.num_sync_all_streams += is_free
        self.lock.release()
        if not is_free:
            return 0
        # A MemPool that dies in a capture must not raise from its destructor: its memory goes with the next
        # empty_cache.
        if self.fences.is_in_capture(self.streams.home):
            if or_later:
                return 0
            raise RuntimeError(f"pool {pool} cannot be emptied while this thread's stream captures a graph: end that "
                               f"capture first")
        if self.strict and self.is_gated():
            if or_later:
                return 0
            raise RuntimeError(f"pool {pool} cannot be emptied while another one is in use (PyTorch 2.11: strict)")
        wait_for_pool(self, id)
        note_captured_streams(self)
        before = self.pool.begin_release(self.recorder.mark_release(self.pool, self.lock, True))
        try:
            return empty_one_pool(self, id)
        finally:
            self.pool.end_release(before)


take_turns(CachingAllocator, b"")
