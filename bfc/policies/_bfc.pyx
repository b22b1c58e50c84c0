"""TensorFlow's policy: what a request is rounded to, when memory grows, and in which order a miss is dealt with."""

import math

cimport cython
from cython.operator cimport dereference as deref, postincrement
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc.native.turns cimport take_turns
from bfc._core cimport (
    ENDS, FREE, GAP, IN_REGIONS, LARGE, LOWER_END, MINIMUM_SIZE, NO_CHUNK, NO_HOST_MEMORY, NO_LANE, OPTIONS, UNLIMITED,
    BinSet, ChunkHandle, Lane, Region, Release, SharedCounter, find_lane, is_large, round_up, take_planned, use_ends,
)
from bfc.buffers._arguments cimport count_from
from bfc.allocators._changes cimport merge_timestamped
from bfc.allocators._private_pools cimport (
    PoolId, PrivatePool, default_pool, id_of, is_private, pool_of, put_in_pool, this_thread,
)
from bfc.allocators._source cimport REFUSED, Taken, total_size
from bfc.allocators._tags cimport TAG_POOLS
from bfc.allocators._plans cimport WHOLE_BESIDE_PLANS, is_beside_plan
from bfc.allocators._chunk_allocator cimport (
    FROM_UPPER_END, ChunkAllocator, Placement, Request, is_apart, is_in_capture, note_hit, set_plain_request,
)
from bfc.allocators._allocator cimport Allocator
from bfc.backings._backing cimport find_in_backings, grow_backing, make_room, release_from_backings
from bfc.backings._pages cimport SMALLEST_PAGE, check_mapping_wanted, may_be_mapped, page_size_for, stitched_pages
from bfc.backings._regions cimport regions_beside

from bfc.policies.ends import AllocationEnd, EndPolicy, check_ends, end_from
from bfc.policies.tensorflow_rules import rules_of
from bfc.units import format_bytes, parse_bytes

cdef extern from *:
    """
    #include <cstdint>

    // In single precision, as TensorFlow does it: 2 GiB becomes 1932735232, where a double would give 1932735488.
    static inline uint64_t bfc_times_nine_tenths(uint64_t size) {
        return static_cast<uint64_t>(static_cast<float>(size) * 0.9f);
    }
    """
    uint64_t bfc_times_nine_tenths(uint64_t size) noexcept nogil


cdef uint64_t backpedal(uint64_t size, cbool rounds_down) noexcept nogil:
    """The next smaller size to ask for after a refusal. It always gets smaller; TensorFlow 2.21's loops for ever at
    256·n."""
    cdef uint64_t smaller = bfc_times_nine_tenths(size)
    if rounds_down:
        # Nine tenths of a size, rounded down, are always less than it: this branch needs no step of its own.
        return smaller & ~<uint64_t>(MINIMUM_SIZE - 1)
    smaller = round_up(smaller, MINIMUM_SIZE)
    return smaller if smaller < size else size - MINIMUM_SIZE


cdef uint64_t grow_to(uint64_t* next_size, uint64_t rounded, uint64_t available, cbool* grew) noexcept nogil:
    """The bytes to ask for, where regions double from one to the next (TensorFlow's behaviour, 2.4). `grew` tells
    region_came() that a large request has doubled the size already."""
    grew[0] = False
    # Kept even if the device then refuses: a failed Extend leaves TensorFlow's size enlarged for good (CC-13).
    while rounded > next_size[0]:
        double_size(next_size)
        grew[0] = True
    return min(next_size[0], available)


cdef void region_came(uint64_t* next_size, cbool grew) noexcept nogil:
    # Also where the limit or the backpedal has made the region smaller than the size: upstream doubles then, too.
    if not grew:
        double_size(next_size)


cdef inline void double_size(uint64_t* next_size) noexcept nogil:
    # Upstream doubles past 2**64 to 0 and then loops for ever.
    if next_size[0] <= (<uint64_t>1 << 62):
        next_size[0] *= 2


cdef enum:
    FIRST_REGION = 2 << 20              # where regions grow
    DEFAULT_SLACK_CAP = 128 << 20       # a chunk with more left over is always split
    SLACK_BESIDE_PLANS = 20 << 20       # PyTorch's max_non_split_rounding_mb


cdef inline cbool hit_plainly(BFCAllocator allocator, uint64_t nbytes, uint64_t stream,
                              Placement* placed) noexcept nogil:
    """A hit where all requests use the same bins."""
    cdef uint64_t rounded = round_up(nbytes, allocator.pool.granularity)
    if allocator.pool.plans.current != NULL:
        return note_hit(allocator.pool, take_planned(allocator.pool, rounded, nbytes, stream), placed)
    # Before each search TensorFlow merges what the safe frontier has passed, and so may find another chunk. `place`
    # does that.
    if allocator.pool.times.timestamped.size():
        return False
    return note_hit(allocator.pool, allocator.pool.allocate_chunk(0, rounded, nbytes, stream, 0, True), placed)


cdef int check_virtual_memory(sub_allocator, virtual_memory, page_size, headroom, strict) except -1:
    """Refuses arguments that do not go together."""
    check_mapping_wanted(sub_allocator, "virtual_memory", virtual_memory, strict, "TensorFlow")
    if not 0 <= headroom < math.inf:
        raise ValueError(f"headroom is a fraction from 0 on, such as 0.05, not {headroom}")
    if not virtual_memory and (page_size is not None or headroom):
        raise ValueError("page_size and headroom are for virtual_memory=True")
    return 0


@cython.no_gc_clear
cdef class BFCAllocator(Allocator):
    """TensorFlow's allocator: best fit with coalescing.

    Parameters
    ----------
    sub_allocator : SubAllocator
        Where regions come from, such as `bfc.CUDASubAllocator()`.
    memory_limit : int, str or float, optional
        The most bytes to take from it: a number, a text such as "4 GiB", or a float, which is a
        fraction of the device's total. None is what the sub-allocator says it can give.
    allow_growth : bool, optional
        False takes the whole limit with the first allocation. True takes 2 MiB first, and then
        regions that double.
    garbage_collection : bool, optional
        Give wholly free regions back if memory has run out, and try again.
    fragmentation_fraction : float, optional
        From 0 to 1. A chunk is split if it is at least twice the request, or if at least this
        fraction of the limit would be left over; 0 stands for 128 MiB.
    strict : bool, optional
        Refuse whatever TensorFlow 2.21 refuses, to compare runs event by event.
    retry_seconds : float, optional
        How long a request that does not fit waits for other threads to free memory.
    stream : int, stream object or None, optional
        The stream that the allocator belongs to. Memory freed on it is reused there at once.
    virtual_memory : bool, optional
        Map memory page by page, and stitch free pages that lie apart where no free chunk is large
        enough: only what shares a page with a live chunk is lost to other requests. Each stream has
        ranges of addresses of its own, chunks are always split, and memory always grows:
        `allow_growth` and `fragmentation_fraction` do nothing. The limit counts pages.
    page_size : int or str, optional
        With `virtual_memory`, the bytes of a page: a power of two, and a multiple of the source's
        `mapping_granularity`. None is the power of two at or above an 8192nd of the limit, from 2 to
        32 MiB. Small pages waste less, and large ones take fewer driver calls.
    headroom : float, optional
        With `virtual_memory`, by how much the memory taken may exceed the most that was ever in
        use, as a fraction of that, where it saves stitching: 0.05 for a program whose sizes do not
        repeat.
    tensorflow : str, optional
        Whose rules to follow: "2.21", or "2.23", TensorFlow's main branch and the allocator of today's XLA
        and JAX. With `strict`, "2.21" ignores a request's alignment, as TensorFlow 2.21 does, and "2.23"
        places the request by it. After a refusal of the device, both ask for 0.9 times as much; "2.23"
        rounds that down to a multiple of 256.
    enable_spatial_partitioning : bool, optional
        Serve requests from two ends of one region: those of the lower end (`allocation_end`) from its
        first address upwards, those of the upper end from its last downwards. What lies free between them
        is for both; a free chunk between others of one end is for that end alone. So the addresses of
        each end depend on its own requests only, as long as the middle suffices: ranks that ask alike
        get equal offsets. It needs `tensorflow="2.23"`.
    initial_region_bytes : int or str, optional
        With partitioning and `allow_growth`, the bytes of that region. Only the upper end grows beyond it:
        in place where the source's blocks follow each other and are joined, else in regions of its own.
        It needs `garbage_collection=False`.
    lower_end_policy : EndPolicy, optional
        With partitioning, how the lower end is served.
    upper_end_policy : EndPolicy, optional
        With partitioning, how the upper end is served.
    plan : Plan, optional
        A plan to serve: see `use_plan`. Beside a plan memory always grows, by what is needed. With
        `virtual_memory` the plan lies in pages, and lends those that it leaves idle.

    Attributes
    ----------
    allow_growth : bool
        As given.
    garbage_collection : bool
        As given.
    fragmentation_fraction : float
        As given.
    virtual_memory : bool
        As given.
    tensorflow : str
        As given.
    enable_spatial_partitioning : bool
        As given.
    initial_region_bytes : int
        As given, in bytes; 0 without growth.
    lower_end_policy : EndPolicy
        As given, or the default.
    upper_end_policy : EndPolicy
        As given, or the default.

    Raises
    ------
    TypeError
        If `sub_allocator` is not a SubAllocator, or another argument has the wrong type.
    ValueError
        If an argument is out of its range, if `stream` cannot be the stream of an allocator, or if
        `virtual_memory` is given together with `strict`, with a source that cannot map memory, or with
        a limit below a page, or if `enable_spatial_partitioning` does not go with other arguments.

    Notes
    -----
    Any thread may use it. Source: `tsl::BFCAllocator` of TensorFlow 2.21; docs/design/differences.md lists where
    it differs on purpose.

    Examples
    --------
    >>> import bfc
    >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), memory_limit="64 MiB")
    >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
    >>> allocator.stats().pool_bytes
    67108864
    """

    def __init__(self, sub_allocator, *, memory_limit=None, allow_growth=False, garbage_collection=True,
                 fragmentation_fraction=0.0, strict=False, retry_seconds=0.0, stream=0, virtual_memory=False,
                 page_size=None, headroom=0.0, tensorflow="2.21", enable_spatial_partitioning=False,
                 initial_region_bytes=None, lower_end_policy=None, upper_end_policy=None, plan=None):
        if not 0 <= fragmentation_fraction <= 1:
            raise ValueError(f"fragmentation_fraction lies between 0 and 1, not {fragmentation_fraction}")
        if not 0 <= retry_seconds < math.inf:
            raise ValueError(f"retry_seconds is a number of seconds from 0 on, not {retry_seconds}")
        rules = rules_of(tensorflow)
        check_virtual_memory(sub_allocator, virtual_memory, page_size, headroom, strict)
        self.enable_spatial_partitioning = enable_spatial_partitioning
        self.lower_end_policy = EndPolicy() if lower_end_policy is None else lower_end_policy
        self.upper_end_policy = EndPolicy() if upper_end_policy is None else upper_end_policy
        check_ends(rules, partitioned=enable_spatial_partitioning, virtual_memory=virtual_memory,
                   planned=plan is not None, grows=allow_growth, collects=garbage_collection,
                   initial=initial_region_bytes, policies=(lower_end_policy, upper_end_policy))
        self.set_up(sub_allocator, memory_limit, stream, strict)
        self.backings = (regions_beside(IN_REGIONS if virtual_memory else 0),)
        if virtual_memory:
            page_size = page_size_for(self.limit, sub_allocator) if page_size is None else page_size
            # Pages are asked first: regions serve whatever they are asked for.
            self.backings = (stitched_pages(self, page_size, headroom), *self.backings)
        self.honours_alignment = rules.honours_alignment
        self.rounds_down = rules.rounds_down
        self.tensorflow = rules.version
        self.allow_growth = allow_growth
        self.garbage_collection = garbage_collection
        self.fragmentation_fraction = fragmentation_fraction
        self.retry_seconds = retry_seconds
        self.slack_cap = DEFAULT_SLACK_CAP
        if fragmentation_fraction > 0:
            # With a cap of 0 TensorFlow splits 0 bytes off an exact fit, and aborts or spoils its table (CC-39).
            self.slack_cap = max(<uint64_t>(self.fragmentation_fraction * <double>self.limit), <uint64_t>MINIMUM_SIZE)
        if enable_spatial_partitioning:
            self.set_up_ends(initial_region_bytes)
        elif not virtual_memory:
            self.pool.add_bin_set(self.slack_cap, True)
            self.pool.add_bin_set(UNLIMITED, False)     # never used: those of lanes come in pairs
        # The first request takes it, without growth as well: upstream's constructor takes nothing.
        self.first_region = round_up(min(self.limit, <uint64_t>FIRST_REGION) if allow_growth else self.limit,
                                     MINIMUM_SIZE)
        # It doubles without growth, too: in TensorFlow a pool that got less than its limit goes on to extend.
        self.next_size = self.first_region
        self.streams.has_lanes.set(virtual_memory)
        # Until here every call finds the allocator closed, as after an __init__ that has raised.
        self.life.is_closed = False
        if plan is not None:
            self.use_plan(plan)

    cdef int set_up_ends(self, object initial_region_bytes) except -1:
        cdef uint64_t[4] slack
        cdef cbool[2] descends
        for i, policy in enumerate((self.lower_end_policy, self.upper_end_policy)):
            slack[i] = 0 if policy.hole_split_policy == "exact" else self.slack_cap
            slack[2 + i] = 0 if policy.gap_split_policy == "exact" else self.slack_cap
            descends[i] = policy.hole_order == "descending"
        if self.allow_growth:
            self.initial_region_bytes = parse_bytes(initial_region_bytes)
            if not 0 < self.initial_region_bytes <= self.limit or self.initial_region_bytes % self.source.alignment:
                raise ValueError(f"initial_region_bytes is a multiple of {self.source.alignment} up to the memory "
                                 f"limit, {self.limit}: not {self.initial_region_bytes}")
        use_ends(self.pool, slack, descends)
        return 0

    def __repr__(self):
        limit = format_bytes(self.limit)
        return f"<bfc.BFCAllocator, limit {limit}{self.mapped.in_words()}, on {self.sub_allocator!r}>"

    @property
    def virtual_memory(self):
        """True if memory is mapped page by page."""
        return self.stitching is not None

    @property
    def next_region_size(self):
        """The size in bytes of the next region, if the limit leaves that much."""
        return self.next_size

    def set_timing_counter(self, SharedCounter counter not None):
        """Mark each free with the next count of a counter (TensorFlow's `SetTimingCounter`).

        From now on a free chunk is merged with its neighbours only once the safe frontier has passed
        its count, unless a request would fail otherwise.

        Parameters
        ----------
        counter : SharedCounter
            May be shared with other allocators.

        Raises
        ------
        TypeError
            If `counter` is not a SharedCounter.
        ValueError
            If the allocator has `virtual_memory`.

        Notes
        -----
        Cost: each allocation then looks through the frees that are not merged yet, O(n) in those.
        Source: TensorFlow's behaviour, 2.9.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        >>> allocator.set_timing_counter(bfc.SharedCounter())
        >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
        >>> [chunk.freed_at_count for chunk in allocator.snapshot().free_chunks()]
        [1, 0]
        """
        self.mapped.check_timing()
        if self.pool.plans.all.size():
            raise ValueError("a plan does not know when memory may be used again by a timing counter: end it first")
        # The counter comes into use between two frees, and not within one.
        self.acquire()
        _before = self.pool.set_timing_counter(counter)
        self.lock.release()

    def set_safe_frontier(self, count):
        """Declare all memory freed before a count safe to merge, and to reuse on any stream.

        Parameters
        ----------
        count : int or callable
            A count of the timing counter, or a callable that returns one. A count lower than the
            last one has no effect.

        Raises
        ------
        TypeError
            If `count` is not an int.
        ValueError
            If `count` is negative or above 2**63 - 1.
        """
        cdef uint64_t frontier = count_from(count)
        # It only rises, whichever thread comes last.
        self.acquire()
        if frontier > self.pool.times.safe_frontier:
            self.pool.times.safe_frontier = frontier
            self.frees.count.add(1)
        self.lock.release()

    cdef uint64_t alignment_for(self, uint64_t alignment) except? 0xFFFFFFFFFFFFFFFF:
        if self.strict and not self.honours_alignment:
            return 0
        return ChunkAllocator.alignment_for(self, alignment)

    cdef int end_for(self, object allocation_end) except -1:
        end = end_from(allocation_end)
        if not self.pool.features & ENDS and end is AllocationEnd.UPPER:
            raise ValueError("this allocator has one end: two need enable_spatial_partitioning=True")
        return FROM_UPPER_END if end is AllocationEnd.UPPER else 0

    cdef int set_freed_before(self, Request* request, object freed_before) except -1:
        request.freed_before = count_from(freed_before)
        return 0

    cdef cbool hit(self, uint64_t nbytes, uint64_t stream, Placement* placed) noexcept nogil:
        if self.streams.has_lanes.get():
            return self.hit_in_lane(nbytes, stream, placed)
        return hit_plainly(self, nbytes, stream, placed)

    cdef cbool hit_in_lane(self, uint64_t nbytes, uint64_t stream, Placement* placed) noexcept nogil:
        """A hit where pages are mapped, or where requests are diverted into private pools."""
        cdef Lane lane
        cdef uint32_t bin_set
        self.set_lane(&lane, stream)
        if self.private_pools.may_have_joined(stream):
            return False        # `look_at_captures` asks
        if stream != self.streams.home and not is_apart(self, &lane):
            return False        # it has to wait for the home stream
        if is_private(&lane):
            bin_set = find_lane(self.pool, &lane)
            if bin_set == NO_LANE or self.pool.times.timestamped.size():
                return False
            return note_hit(self.pool, self.pool.allocate_chunk(
                bin_set + LARGE, round_up(nbytes, self.pool.granularity), nbytes, stream, 0, True), placed)
        if self.stitching is not None:
            return note_hit(self.pool, self.pool.allocate_in_range(&lane, nbytes), placed)
        return hit_plainly(self, nbytes, stream, placed)

    cdef void set_request(self, Request* request, uint64_t nbytes, uint64_t stream) noexcept nogil:
        set_plain_request(request, nbytes, round_up(nbytes, self.pool.granularity), stream)

    @cython.final
    cdef void set_lane(self, Lane* lane, uint64_t stream) noexcept nogil:
        lane.pool[0] = lane.pool[1] = 0
        if self.private_pools.open_scopes.get():
            self.private_pools.divert(lane, stream, default_pool())
        self.tell_apart(lane, stream)

    cdef void tell_apart(self, Lane* lane, uint64_t stream) noexcept nogil:
        """Fills in the stream of a lane whose pool is known."""
        cdef cbool apart = is_apart(self, lane)
        # One set of free chunks serves all streams: whoever gets memory on another one waits for the home stream.
        lane.stream = stream if apart else self.streams.home
        lane.thread = this_thread() if apart and self.streams.of_threads.size() and self.is_of_thread(stream) else 0

    cdef void scopes_changed(self) noexcept:
        # Scopes open and close in several threads: what is written last here must be what holds.
        self.acquire()
        self.streams.has_lanes.set(self.stitching is not None or self.private_pools.open_scopes.get() > 0)
        self.lock.release()

    cdef ChunkHandle place(self, Request* request) noexcept nogil:
        cdef cbool satisfied
        self.set_lane(&request.lane, request.stream)
        if request.captured[0] or request.captured[1]:
            self.private_pools.divert(&request.lane, request.stream, PoolId(request.captured[0], request.captured[1]))
            self.tell_apart(&request.lane, request.stream)
        if request.tag:
            # Its free chunks have addresses and no memory. The error is raised by `place_after_miss`, without the lock.
            if self.tags.is_asleep(request.tag):
                return NO_CHUNK
            put_in_pool(&request.lane, PoolId(TAG_POOLS, request.tag))
        if self.pool.times.timestamped.size():
            merge_timestamped(self.pool, 0, &satisfied)
        return find_in_backings(self, request)

    cdef cbool takes_pages(self, Request* request) noexcept nogil:
        """Whether a request is for memory that is mapped, or lies in a region only because it cannot be mapped."""
        return self.stitching is not None and may_be_mapped(&request.lane)

    cdef int place_after_miss(self, Request* request, Placement* placed) except -1 nogil:
        """The order of attempts is TensorFlow's: extend; merge what is not safe yet; collect and extend (TensorFlow's
        behaviour, 2.2). Where pages are mapped, free ones make room for a region, and free regions for pages."""
        if request.tag:
            self.tags.refuse_if_asleep(request.tag)
        grow_backing(self, request, placed)
        # Not for a request with a bound: what a forced pass merges has the latest timestamp of its parts.
        if placed.handle == NO_CHUNK and request.freed_before == 0 and self.pool.times.timestamped.size():
            self.merge_and_find(request, placed)
        # Collection comes after growth: upstream never collects to keep a pool small. In a capture nothing goes back,
        # since that waits for the device to be idle, which would spoil the capture.
        if placed.handle != NO_CHUNK or not self.garbage_collection or is_in_capture(self, request):
            return 0
        # Whether enough went is not asked: other threads may have it by now.
        if make_room(self, request, request.rounded):
            grow_backing(self, request, placed)
        if placed.handle == NO_CHUNK and self.release_for(request):
            grow_backing(self, request, placed)
        return 0

    cdef int add_region(self, Request* request, Placement* placed) except -1 nogil:
        """Adds a region as TensorFlow does, or for a request that must not lie in pages as large as those would be."""
        if request.lane.thread & IN_REGIONS:
            return self.add_like_pages(request, placed)
        return self.extend(request, placed)

    cdef int add_like_pages(self, Request* request, Placement* placed) except -1 nogil:
        cdef Region block
        cdef uint64_t nbytes = round_up(request.rounded, self.stitching.page_size)
        # The limit is compared and the bytes are set aside at once: no other thread counts on them.
        self.acquire()
        cdef cbool fits = self.source.set_bytes_aside(nbytes, self.limit, &request.blocked)
        self.lock.release()
        if fits and self.source.ask(&request.asking, nbytes, &block, True):
            self.take_region(request, placed, &block)
        return 0

    cdef void merge_and_find(self, Request* request, Placement* placed) noexcept nogil:
        cdef cbool satisfied = False
        # What was merged is looked through before another thread can take it.
        self.acquire()
        merge_timestamped(self.pool, request.rounded, &satisfied)
        if satisfied:
            self.fill(self.find(request), request, placed)
        self.lock.release()

    cdef uint64_t available(self) noexcept nogil:
        """What is left of the limit. In upstream it wraps around if a sub-allocator gave more than was asked for."""
        cdef uint64_t taken = self.source.taken()
        return self.limit - taken if taken < self.limit else 0

    cdef int extend(self, Request* request, Placement* placed) except -1 nogil:
        """Adds a region of at least the rounded request, asking for less after each refusal (TensorFlow's
        behaviour, 2.4), and places the request there. `placed` does not change if there is no such region."""
        if self.pool.features & ENDS and not is_private(&request.lane):
            return self.extend_at_ends(request, placed)
        return self.extend_by(request, placed, request.rounded, 0)

    cdef int extend_at_ends(self, Request* request, Placement* placed) except -1 nogil:
        """As extend, where there are two ends: first the region of both, without which there is no other, and then, if
        it grows, what the upper end lacks (TensorFlow's behaviour, 2.17)."""
        cdef cbool is_first, is_missing
        cdef uint64_t least
        # Another thread may add that region.
        self.acquire()
        is_first = self.pool.two_ends.shared_begin == 0
        self.lock.release()
        if is_first:
            # A named first region may come out smaller than this request: upstream backpedals until something is given.
            least = request.rounded if self.initial_region_bytes == 0 else MINIMUM_SIZE
            self.extend_by(request, placed, least, self.initial_region_bytes)
            # It may have been added by this thread or by another one.
            self.acquire()
            is_missing = self.pool.two_ends.shared_begin == 0
            self.lock.release()
            if is_missing:
                return 0
        # The lower end never grows: its addresses must not depend on what the upper one asks.
        if placed.handle != NO_CHUNK or not self.allow_growth or request.end == LOWER_END or request.asking.fault:
            return 0
        # The ends of the regions move with each request.
        self.acquire()
        least = self.lacking_anywhere(request)
        self.lock.release()
        return self.extend_by(request, placed, least, 0)

    cdef uint64_t lacking_anywhere(self, Request* request) noexcept nogil:
        """The bytes that a request lacks if the block that comes extends a region, whichever that is. Needs the lock.
        """
        cdef uint64_t least = UNLIMITED
        cdef cmap[uint64_t, Region].iterator it = self.pool.regions.begin()
        # No block will extend a region, so nothing that lies free at an end of one helps.
        if not self.source.joins_regions:
            return request.rounded
        while it != self.pool.regions.end():
            if self.pool.chunks[deref(it).second.first].bin_set <= GAP:     # others belong to private pools
                least = min(least, self.lacking_behind(request, &deref(it).second))
            postincrement(it)
        return request.rounded if least == UNLIMITED else least

    cdef uint64_t lacking_behind(self, Request* request, Region* region) noexcept nogil:
        """The bytes that a request lacks behind a region, if that grows. Needs the lock."""
        cdef ChunkHandle tail = self.pool.chunk_at_end(region)
        cdef uint64_t start = region.end
        # A tail with a timestamp does not merge with what comes behind it.
        if self.pool.chunks[tail].state == FREE and self.pool.chunks[tail].freed_at_count == 0:
            start = self.pool.chunks[tail].ptr
        if request.alignment:
            start = round_up(start, request.alignment)
        return start + request.rounded - region.end

    cdef cbool lies_well(self, Request* request, Region* block) noexcept nogil:
        """Whether a block that extends a region, or does not, is enough for the request. Needs the lock."""
        cdef cmap[uint64_t, Region].iterator before = self.pool.regions.find(block.ptr)
        if (self.source.joins_regions and before != self.pool.regions.end()
                and self.pool.chunks[deref(before).second.first].bin_set <= GAP):
            return block.end - block.ptr >= self.lacking_behind(request, &deref(before).second)
        return block.end - block.ptr >= request.rounded

    cdef int extend_by(self, Request* request, Placement* placed, uint64_t least, uint64_t wanted) except -1 nogil:
        """Adds a region of at least `least` bytes; `wanted` is what is asked for first, or 0 for what growth says."""
        cdef cbool grew = wanted > 0
        cdef uint64_t size = 0
        cdef Region block
        cdef int got
        cdef cbool well
        self.acquire()
        # Upstream rounds down what the limit leaves, and not the limit itself (CC-19, CC-20).
        cdef uint64_t available = self.available() & ~<uint64_t>(MINIMUM_SIZE - 1)
        cdef uint64_t* next_size = self.next_size_of(request)
        if next_size == NULL:
            placed.handle = NO_HOST_MEMORY
        elif least <= available:
            if wanted:
                size = min(wanted, available)
            else:
                size = grow_to(next_size, max(request.rounded, least), available, &grew)
            if is_beside_plan(self.pool):      # what lies beside a plan does not double
                size = min(size, max(request.rounded, <uint64_t>FIRST_REGION))
            elif self.planned is not None and self.planned.has_ended_early():
                size = min(size, max(request.rounded, self.planned.room_for(request.rounded, True)))
        # Bytes set aside for other calls may come back; those that the sub-allocator did not take back will not soon.
        request.blocked = size == 0 and least <= available + self.source.set_aside - self.source.unreturned.nbytes
        if size == 0:
            # The text of the error then says that the limit has refused, and not the device.
            self.source.refused_bytes.set(0)
        self.source.set_aside += size      # under the same lock: no other thread may find the limit free meanwhile
        self.lock.release()
        if size == 0:
            return 0
        got = self.source.ask(&request.asking, size, &block, True)
        # A driver that fails is not out of memory, and would fail for less as well.
        while not got and size > least and request.asking.fault == 0:
            size = backpedal(size, self.rounds_down)
            # The request itself may never be tried: TensorFlow's steps of a tenth jump over it, too (CC-15).
            if size < least:
                return 0
            # Not set aside yet: a call that is refused gives its bytes back to the limit.
            got = self.source.ask(&request.asking, size, &block, False)
        if got:
            # The size of the next region follows from this one, before another thread asks for it.
            self.acquire()
            well = (wanted > 0 or not self.pool.features & ENDS or is_private(&request.lane)
                    or self.lies_well(request, &block))
            # Looked up again: the lock was free meanwhile, so a pool may have come or gone, and the size with it.
            next_size = self.next_size_of(request)
            if next_size != NULL and well:
                region_came(next_size, grew)
            self.lock.release()
            if not well:
                return self.give_back_block(request, &block)
            self.take_region(request, placed, &block)
        return 0

    cdef int give_back_block(self, Request* request, Region* block) except -1 nogil:
        """Gives back a block that does not lie where it would have sufficed."""
        cdef vector[Region] blocks
        cdef Taken taken
        self.acquire()
        # With no lane `take_in` adds nothing to the pool, and counts the bytes until they have gone back.
        taken = self.source.take_in(&request.asking, block, NO_LANE, blocks)
        self.lock.release()
        request.asking.changes += blocks.size()     # a change of this thread's own is no reason to try again
        self.source.give_back(blocks, request.asking.without_gil)
        return 0 if taken == REFUSED or request.asking.without_gil else self.source.refuse(block, taken, False)

    cdef uint64_t* next_size_of(self, Request* request) noexcept nogil:
        """The size of the next region for a request: a private pool has its own. NULL: the host is out of memory. Needs
        the lock."""
        cdef PrivatePool* pool
        if not is_private(&request.lane):
            return &self.next_size
        if not self.private_pools.know(pool_of(&request.lane)):
            return NULL
        pool = self.private_pools.find(pool_of(&request.lane))
        # Small without growth as well: a region as large as the limit would never fit beside the default pool's.
        if pool.next_region == 0:
            pool.next_region = round_up(min(self.limit, <uint64_t>FIRST_REGION), MINIMUM_SIZE)
        return &pool.next_region

    cdef int place_where_refused(self, Request* request, Placement* placed) except -1 nogil:
        """Asks for exactly the rounded request, which upstream never does, unless that was the last size tried."""
        cdef uint64_t rounded = request.rounded
        cdef Region block
        cdef cbool fits
        if self.strict or self.takes_pages(request) or request.asking.fault or request.asking.asked == rounded:
            return 0
        if self.has_lost(request):
            return 0
        # The limit is compared and the bytes are set aside at once: no other thread counts on them.
        self.acquire()
        fits = rounded <= self.available()
        if fits:
            self.source.set_aside += rounded
        self.lock.release()
        if fits and self.source.ask(&request.asking, rounded, &block, True):
            self.take_region(request, placed, &block)
        return 0

    cdef cbool has_lost(self, Request* request) noexcept nogil:
        """Whether no further region may serve a request: where there are two ends, all but one are for the upper end.
        """
        return (self.pool.features & ENDS and not is_private(&request.lane) and self.pool.two_ends.shared_begin
                and (not self.allow_growth or request.end == LOWER_END))

    cdef int release_for(self, Request* request) except -1 nogil:
        """Gives all wholly free regions back, if a region of the rounded size would fit the limit then (TensorFlow's
        behaviour, 2.7). With pages it does so in any case, since free pages serve a part of the request."""
        cdef vector[Region] regions
        cdef uint64_t total, kept
        # Listed and taken out at once, so that nobody is handed one of them. They go back without the lock.
        self.acquire()
        self.pool.list_regions(regions, False)
        self.private_pools.keep_used(self.pool, True, default_pool(), regions)
        total = total_size(regions)
        kept = self.source.taken() - total
        # TensorFlow frees nothing where that would not be enough (CC-37c), and else all of it.
        if total == 0 or (self.stitching is None and (kept > self.limit or request.rounded > self.limit - kept)):
            self.lock.release()
            return False
        self.source.forget(regions)
        self.private_pools.drop_empty(self.pool, default_pool())
        self.lock.release()
        self.source.give_back(regions, request.asking.without_gil)
        request.asking.changes += regions.size()
        return True

    def _empty_pool(self, pool):
        """Gives back what a released pool of graphs caches, if it has no reference. Returns the bytes."""
        cdef PoolId id = id_of(pool)
        cdef vector[Region] regions
        cdef uint64_t released
        cdef int64_t mark = self.recorder.mark_release(self.pool, self.lock, True)
        # Listed and taken out at once, so that nobody is handed one of them. They go back without the lock.
        self.acquire()
        self.pool.list_regions(regions, False)
        self.private_pools.keep_used(self.pool, False, id, regions)
        cdef Release before = self.pool.begin_release(mark)
        released = self.source.forget(regions)
        self.pool.end_release(before)
        self.private_pools.drop_empty(self.pool, id)
        self.lock.release()
        self.source.give_back(regions, False)
        return released

    cdef uint64_t release_mapped(self) except? 0xFFFFFFFFFFFFFFFF:
        return release_from_backings(self)

    cdef void regions_released(self) noexcept nogil:
        self.next_size = self.first_region

    cdef int plan_changed(self) except -1:
        """Beside a plan large chunks stay whole: the next step needs them as they are."""
        cdef cbool planned
        if self.stitching is not None:
            return 0            # pages need no chunk as a whole
        # Another thread may end the plan.
        self.acquire()
        planned = is_beside_plan(self.pool)
        if self.pool.features & OPTIONS and not planned:
            self.next_size = self.first_region      # each region beside the plan has doubled the next
        self.pool.bin_sets[0].oversize = WHOLE_BESIDE_PLANS if planned else UNLIMITED
        self.pool.bin_sets[0].oversize_slack = SLACK_BESIDE_PLANS
        self.pool.features &= ~<uint32_t>OPTIONS
        self.pool.features |= OPTIONS if planned else 0
        self.lock.release()
        return 0

    cdef str refused_by(self, Request* request):
        if not is_private(&request.lane) or self.allow_growth or self.source.refused_bytes.get():
            return ChunkAllocator.refused_by(self, request)
        return (f"the memory limit, of which {format_bytes(self.available())} are not taken yet: what a graph is given "
                f"lies in regions of its own, and allow_growth=True leaves room for them")

    cdef object against_pieces(self):
        if self.strict or self.limit < SMALLEST_PAGE or not self.sub_allocator.supports_virtual_memory:
            return ""
        return self.mapped.against_pieces()

    # -- memory that is mapped ----------------------------------------------------------------------------------------

    @cython.final
    cdef uint32_t bin_set_of(self, Request* request) noexcept nogil:
        cdef uint32_t lane
        if self.stitching is None and not is_private(&request.lane):
            # The number of the end is that of its set of bins; with one end it is 0.
            return request.end
        lane = find_lane(self.pool, &request.lane)
        if lane == NO_LANE:
            lane = self.pool.open_lane(&request.lane)
            if lane == NO_LANE:
                return NO_LANE
            self.set_rules(lane)
        if not may_be_mapped(&request.lane):
            # A graph's pool has one set for all sizes, as TensorFlow's pool has: the other one of the pair stays empty.
            return lane + LARGE
        return lane + is_large(request.rounded)

    cdef void set_rules(self, uint32_t lane) noexcept nogil:
        """A lane in pages keeps small chunks apart. A private pool has one set of bins, as the default pool has without
        pages."""
        cdef BinSet* opened
        cdef uint32_t kind
        for kind in range(2):
            opened = &self.pool.bin_sets[lane + kind]
            opened.is_range = may_be_mapped(&opened.lane) and not opened.lane.thread & IN_REGIONS
            opened.split_at_twice = not may_be_mapped(&opened.lane)
            opened.split_remainder = self.slack_cap if opened.split_at_twice else MINIMUM_SIZE
            opened.oversize = opened.cuts_below = UNLIMITED


take_turns(BFCAllocator, b"")
