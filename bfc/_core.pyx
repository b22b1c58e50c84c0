"""The pool: best fit with coalescing over integers. `_core.pxd` has its data layout and its terms."""

cimport cython
from cython.operator cimport dereference as deref, postincrement
from libc.stdlib cimport free, realloc
from libc.string cimport memmove, memset

from bfc.native.nothrow cimport try_push_back, try_reserve, try_store

from bfc.interpreter.stubs import SignatureOfStub

cdef extern from *:
    """
    #include <cstdint>
    #include "history.hpp"
    #include "timeline.hpp"
    #include "usage.hpp"
    #include "pool_usage.hpp"
    #include "page_bitmap.hpp"
    #include "plan_server.hpp"

    static inline int64_t bfc_count_up(int64_t* value) { return __atomic_add_fetch(value, 1, __ATOMIC_RELAXED); }

    #include <new>

    #include "bins.hpp"
    #include "owners.hpp"
    #include "pending_frees.hpp"
    #include "starts.hpp"
    #include "torch_sizes.hpp"
    // Room in what a pool has an entry or a bit for each chunk in. Out of line: inlined, it would make the loops of
    // replays larger, in which a table hardly ever grows.
    __attribute__((noinline)) static bool bfc_make_room(bfc::PendingFrees& pending, std::vector<uint64_t>& bits,
                                                        size_t chunks) noexcept {
        try {
            bits.resize(chunks / 64 + 1);
        } catch (...) {
            return false;
        }
        return pending.reserve(chunks);
    }

    static inline bfc::Bins* bfc_new_bins() noexcept { return new (std::nothrow) bfc::Bins(); }

    // The chunk in use that starts at the address; Chunk is the struct of _core.pxd.
    template <class Chunk>
    static inline uint32_t bfc_find_start(const bfc::Starts& starts, const Chunk* chunks, uint64_t address) {
        return starts.find(address, [=](uint32_t handle) { return chunks[handle].ptr == address; });
    }

    // The same, taken out of the table, if its state is this one; `ignored` are bits that do not matter.
    template <class Chunk>
    static inline uint32_t bfc_take_start(bfc::Starts& starts, const Chunk* chunks, uint64_t address, uint32_t state,
                                          uint32_t ignored) {
        return starts.take(address, [=](uint32_t handle) {
            return chunks[handle].ptr == address && (chunks[handle].state & ~ignored) == state;
        });
    }
    """
    int64_t count_up "bfc_count_up"(int64_t* value) noexcept nogil
    Bins* new_bins "bfc_new_bins"() noexcept nogil
    cbool bfc_make_room(PendingFrees& pending, vector[uint64_t]& bits, size_t chunks) noexcept nogil
    uint32_t bfc_find_start(const Starts& starts, const Chunk* chunks, uint64_t address) noexcept nogil
    uint32_t bfc_take_start(Starts& starts, const Chunk* chunks, uint64_t address, uint32_t state,
                            uint32_t ignored) noexcept nogil

cdef extern from *:
    """
    /* What this thread is giving back. Others may empty the same cache meanwhile: in between, no lock is held. */
    static thread_local const void* bfc_releasing;
    static thread_local int64_t bfc_release_number;
    """
    const void* releasing "bfc_releasing"
    int64_t release_number "bfc_release_number"

cdef extern from "ranges.hpp" namespace "bfc" nogil:
    int find_in_both(Bins& plain, Bins& ranges, const Chunk* chunks, uint32_t no_chunk, uint32_t unmapped,
                     uint64_t rounded, FreeChunk& found) noexcept

cdef extern from "region_numbers.hpp" namespace "bfc" nogil:
    cbool number_again(cmap[uint64_t, Region]& regions) noexcept

cdef extern from "memory.hpp" namespace "bfc" nogil:
    void prefer_huge_pages(void* block, size_t bytes) noexcept
    void prefetch(const void* address) noexcept

cdef enum:
    CACHE_LINE = 64
    FIRST_CHUNKS = 64
    CHUNKS_CHECKED_AT_EACH_CHANGE = 256
    LOOK_AHEAD = 6                  # events
    FITS_THE_CACHE = 4096           # chunks: their records take a quarter of a megabyte
    PAIRS_LOOKED_AT = 64            # for one that may be reopened
    MOST_NUMBERS = 1 << 24          # of regions, before they are numbered again
    OFFSET_BITS = 40                # for the place in a region, in sectors: a region cannot be larger
    SECTOR_BITS = 9                 # PyTorch's chunks start at multiples of 512
    REGION_BITS = 21                # PyTorch's smallest segments have 2 MiB


cdef BinSet bin_set_of(Bins* bins, uint32_t kind) noexcept nogil:
    """A set of bins whose chunks are handed out whole, of any size."""
    cdef BinSet bin_set
    memset(&bin_set, 0, sizeof(BinSet))
    bin_set.bins = bins
    bin_set.split_remainder = UNLIMITED
    bin_set.oversize = bin_set.cuts_below = UNLIMITED
    bin_set.counts_pieces = True
    bin_set.kind = kind
    return bin_set


@cython.auto_pickle(True)    # a plain number, which could always be pickled
cdef class SharedCounter:
    """A counter of frees that several allocators share (TensorFlow's `SharedCounter`).

    `BFCAllocator.set_timing_counter` gives each free its next count. `allocate_raw(freed_before=...)`
    then uses no memory that was freed at a later count, and `BFCAllocator.set_safe_frontier` says which
    count the device has reached.

    Examples
    --------
    >>> import bfc
    >>> counter = bfc.SharedCounter()
    >>> counter.next(), counter.next()
    (1, 2)
    """

    __signature__ = SignatureOfStub()

    def next(self) -> int:
        """Count up.

        Returns
        -------
        int
            The next count: 1, 2, 3, ...
        """
        return self.next_count()

    cdef int64_t next_count(self) noexcept nogil:
        return count_up(&self.value)    # two allocators may share it, and a replay runs without the GIL


cdef inline cbool take_at_end(Pool pool, Bins* among, uint32_t end, uint64_t rounded, uint64_t freed_before,
                              uint64_t alignment, FreeChunk& found) noexcept nogil:
    """Takes the best fit for an end out of its bins. Needs a reserve() before it: what does not fit goes back."""
    if not among.pop_best_fit(rounded, found):
        return False
    if fits_at_end(pool, end, found.handle, rounded, freed_before, alignment):
        return True
    among.insert(found.size, found.order, found.handle)
    while among.lower_bound(found.size, found.order + 1, found):
        if fits_at_end(pool, end, found.handle, rounded, freed_before, alignment):
            among.erase(found.size, found.order)
            return True
    return False


cdef inline uint32_t end_of(Events* events, size_t i, uint32_t features) noexcept nogil:
    """The set of bins that an event without a lane asks from."""
    return events.end[i] if features & ENDS and events.end != NULL else LOWER_END


cdef inline cbool enter_pool(Events* events, size_t i, uint32_t features, Lane* lane,
                             uint32_t* lane_set) noexcept nogil:
    """Puts the private pool of an event into a lane, and forgets the lane's set of bins if it was another one. False:
    there are no lanes, and the caller must serve the event."""
    cdef const uint64_t* id
    if events.pool == NULL:
        return True
    id = &events.pools[2 * events.pool[i]]
    if id[0] != lane.pool[0] or id[1] != lane.pool[1]:
        lane.pool[0] = id[0]
        lane.pool[1] = id[1]
        lane_set[0] = NO_LANE
    return features & COUNTS != 0 or events.pool[i] == 0


cdef inline void look_ahead(Events* events, Chunk* chunks, size_t chunk_count, size_t i) noexcept nogil:
    """Prefetches what later frees will touch: their entry in the table, then the chunk, then its neighbours. A trace
    names them in advance, and each would be a cache miss if thousands of chunks are live.

    It has no branch: if there is no such chunk (it is not allocated yet, or has no neighbour), it prefetches the first.
    """
    cdef size_t j = i + 3 * LOOK_AHEAD
    if j >= events.count:
        return
    prefetch(&events.handles[events.number[j]])
    cdef ChunkHandle handle = events.handles[events.number[j - LOOK_AHEAD]]
    prefetch(&chunks[handle if handle < chunk_count else 0])
    handle = events.handles[events.number[j - 2 * LOOK_AHEAD]]
    cdef Chunk* chunk = &chunks[handle if handle < chunk_count else 0]
    prefetch(&chunks[chunk.prev if chunk.prev < chunk_count else 0])
    prefetch(&chunks[chunk.next if chunk.next < chunk_count else 0])


cdef class PoolPages:
    """What a pool asks of its pages that have several addresses: `allocators/_pages.pyx` keeps them, above this file.
    It is asked at a miss, at a free in a view, and when a page of small chunks becomes free. Needs the lock."""

    cdef cbool free_view(self, ChunkHandle handle) noexcept nogil:
        """Frees a chunk that lies in no bitmap."""
        return False

    cdef ChunkHandle find_elsewhere(self, uint32_t bin_set, uint64_t rounded, uint64_t requested, uint64_t stream,
                                    cbool indexed) noexcept nogil:
        """Serves a request that no chunk fits, or returns NO_CHUNK."""
        return NO_CHUNK

    cdef cbool move_back(self, ChunkHandle handle, uint64_t ptr, uint64_t size) noexcept nogil:
        """Told that these bytes of a free chunk, in a range of small chunks, have become free. Whether pages have
        moved."""
        return False


# Not known to the garbage collector: a pool and its pages refer to each other until the pages' owner goes.
@cython.final
@cython.no_gc
cdef class Pool:
    """Regions cut into chunks. Every method that takes a handle trusts it; the allocator checks what users pass."""

    def __cinit__(self):
        self.granularity = MINIMUM_SIZE
        if not self.grow_chunks():
            raise MemoryError

    def __dealloc__(self):
        cdef BinSet bin_set
        for bin_set in self.bin_sets:
            del bin_set.bins
            del bin_set.bitmap
        del self.books.usage
        del self.books.pool_usage
        del self.books.history
        cdef PlanServer* plan
        for plan in self.plans.all:
            del plan
        free(self.records.block)

    # -- sets of bins -------------------------------------------------------------------------------------------------

    cdef uint32_t add_bin_set(self, uint64_t split_remainder, bint split_at_twice) except? 0xFFFFFFFF:
        cdef BinSet bin_set = bin_set_of(new_bins(), LARGE)
        bin_set.split_remainder = split_remainder
        bin_set.split_at_twice = split_at_twice
        if bin_set.bins == NULL or not try_push_back(self.bin_sets, bin_set):
            del bin_set.bins
            raise MemoryError
        return <uint32_t>(self.bin_sets.size() - 1)

    cdef int use_lanes(self) except -1:
        """From now on keeps chunks of different lanes and kinds apart, and counts as PyTorch does."""
        self.books.usage = new Usage()
        self.features |= COUNTS
        self.books.pool_usage = new PoolUsage()
        return 0

    cdef uint32_t open_lane(self, Lane* lane) noexcept nogil:
        """Opens a lane, reusing the record of one without regions if it finds one. NO_LANE: the host is out of memory.
        """
        cdef uint32_t i = next_to_reopen(self), kind, ranges
        cdef BinSet* opened
        if i == NO_LANE:
            i = <uint32_t>self.bin_sets.size()
            if not open_pair(self):
                return NO_LANE
        ranges = self.bin_sets[i].ranges or self.bin_sets[i + 1].ranges
        if ranges and not self.lanes.pool_sets.enter(ranges // 2, lane.pool):
            return NO_LANE
        if not self.lanes.pool_sets.enter(i // 2, lane.pool):
            return NO_LANE
        for kind in range(2):
            opened = &self.bin_sets[i + kind]
            opened.lane = lane[0]
            opened.asleep = False
            if opened.ranges:
                self.bin_sets[opened.ranges].asleep = False
                self.bin_sets[opened.ranges].lane = lane[0]
                self.bin_sets[opened.ranges].lane.thread = IN_RANGES
        return i

    cdef uint32_t open_ranges(self, uint32_t bin_set) noexcept nogil:
        """The set of bins for the chunks in ranges of the same lane and kind; a new one, if need be. NO_LANE: the host
        is out of memory."""
        cdef uint32_t pair = bin_set & ~<uint32_t>1, added = <uint32_t>self.bin_sets.size(), kind
        if self.bin_sets[bin_set].ranges == 0:
            if not open_pair(self):
                return NO_LANE
            if not self.lanes.pool_sets.enter(added // 2, self.bin_sets[pair].lane.pool):
                return NO_LANE      # the new pair stays, to be reopened
            self.features |= OPTIONS if self.books.usage != NULL else 0
            for kind in range(2):
                self.bin_sets[pair + kind].ranges = added + kind
                self.bin_sets[added + kind].lane = self.bin_sets[pair].lane
                self.bin_sets[added + kind].lane.thread = IN_RANGES
                self.bin_sets[added + kind].is_range = True
                self.bin_sets[added + kind].counts_pieces = False
        return self.bin_sets[bin_set].ranges

    cdef void note(self, uint32_t action, Chunk* chunk, uint64_t size) noexcept nogil:
        """Adds an entry about a chunk to the history."""
        cdef Lane* lane = &self.bin_sets[chunk.bin_set].lane
        # Streams may share a lane.
        cdef cbool is_of_chunk = self.books.usage == NULL and action <= HISTORY_FREE_COMPLETED
        cdef int64_t number = chunk.allocation_id
        if (action == HISTORY_SEGMENT_FREE or action == HISTORY_SEGMENT_UNMAP) and releasing == <const void*>self:
            number = release_number or number
        self.books.history.add(HistoryRecord(chunk.ptr, size, chunk.stream if is_of_chunk else lane.stream,
                                             [lane.pool[0],
                                              lane.pool[1]], 0, number, action, chunk.state >> OWNER_SHIFT))

    cdef Release begin_release(self, int64_t number) noexcept nogil:
        """From now on the history shows what this thread frees as the work of this call. Returns what was before, for
        `end_release`: a source in Python may empty another cache."""
        global releasing, release_number
        cdef Release before = Release(releasing, release_number)
        releasing = <const void*>self
        release_number = number
        return before

    cdef void end_release(self, Release before) noexcept nogil:
        global releasing, release_number
        releasing = before.pool
        release_number = before.number

    cdef inline void set_owner(self, ChunkHandle handle, uint32_t owner) noexcept nogil:
        """Sets the owner of a chunk that was just handed out: a number that `owned` knows, or 0 for nobody."""
        if owner == 0:
            return
        self.books.owned.give(&self.chunks[handle], owner)
        if self.books.history != NULL:
            self.books.history.set_owner(self.chunks[handle].allocation_id, owner)

    cdef void note_free(self, Chunk* chunk) noexcept nogil:
        """Adds to the history that a chunk has become free."""
        if chunk.state & STATE != WAITING:
            self.note(HISTORY_FREE_REQUESTED, chunk, chunk.requested_size)
        self.note(HISTORY_FREE_COMPLETED, chunk, chunk.requested_size)

    # -- allocate and free --------------------------------------------------------------------------------------------

    cdef inline ChunkHandle allocate_chunk(self, uint32_t bin_set, uint64_t rounded, uint64_t requested,
                                           uint64_t stream, uint64_t freed_before, cbool indexed) noexcept nogil:
        """The best fit of `rounded` bytes, split where the policy says so. NO_CHUNK, or NO_HOST_MEMORY.

        `freed_before` > 0 passes over chunks that were freed later (TensorFlow's behaviour, 2.9). `indexed` makes its
        address known to handle_of; a caller that keeps the handle does not need that.
        """
        if self.features == 0:
            return find_and_hand_out(self, &self.counters, bin_set, rounded, requested, stream, freed_before, indexed,
                                     0)
        return find_and_hand_out(self, &self.counters, bin_set, rounded, requested, stream, freed_before, indexed,
                                 self.features)

    cdef ChunkHandle allocate_aligned(self, uint32_t bin_set, uint64_t rounded, uint64_t requested, uint64_t stream,
                                      uint64_t freed_before, uint64_t alignment, cbool indexed) noexcept nogil:
        """Like allocate_chunk, at a multiple of `alignment`, a power of two: the best fit is the smallest chunk that is
        large enough behind its first such address. What lies before that stays free. 0: at any address. Cost: O(n) in
        the free chunks that are large enough, but not behind that address."""
        if alignment == 0:
            return self.allocate_chunk(bin_set, rounded, requested, stream, freed_before, indexed)
        if self.features & ENDS and bin_set <= UPPER_END:
            return allocate_at_ends(self, &self.counters, bin_set, rounded, requested, stream, freed_before, alignment,
                                    indexed)
        return self.allocate_by(&self.bin_sets[bin_set], rounded, requested, stream, freed_before, alignment, indexed)

    cdef ChunkHandle allocate_by(self, BinSet* wanted, uint64_t rounded, uint64_t requested, uint64_t stream,
                                 uint64_t freed_before, uint64_t alignment, cbool indexed) noexcept nogil:
        """Like allocate_aligned, by the rules in `wanted`: those of a set of bins, or a copy of them that was changed
        for this one search."""
        if alignment == 0:
            return find_by(self, &self.counters, wanted, NO_LANE, rounded, requested, stream, freed_before, indexed,
                           self.features)
        cdef FreeChunk found
        cdef ChunkHandle aligned
        cdef uint64_t before = 0
        if not has_two_records(self) or not wanted.bins.reserve() or (indexed and not self.starts.reserve()):
            return NO_HOST_MEMORY
        cdef cbool some = wanted.bins.lower_bound(rounded, 0, found)
        while some:
            before = round_up(self.chunks[found.handle].ptr, alignment) - self.chunks[found.handle].ptr
            if (found.size - rounded >= before and (rounded >= wanted.oversize or found.size < wanted.oversize)
                    and (freed_before == 0 or freed_before >= self.chunks[found.handle].freed_at_count)):
                break
            some = wanted.bins.lower_bound(found.size, found.order + 1, found)
        if not some:
            return NO_CHUNK
        wanted.bins.erase(found.size, found.order)
        if before == 0:
            return self.hand_out(&self.counters, wanted, found.handle, rounded, requested, stream, indexed,
                                 self.features)
        if self.books.usage != NULL:
            self.books.usage.came_apart(wanted.kind, found.size, self.chunks[found.handle].prev != NO_CHUNK
                                        or self.chunks[found.handle].next != NO_CHUNK)
        self.split_chunk(wanted.bins, found.handle, before, self.chunks[found.handle].freed_at_count, True)
        aligned = self.chunks[found.handle].next
        self.remove_free_chunk_from_bin(wanted.bins, aligned, True)
        self.insert_free_chunk_into_bin(wanted.bins, found.handle, True)
        return self.hand_out(&self.counters, wanted, aligned, rounded, requested, stream, indexed, self.features)

    # -- two ends -----------------------------------------------------------------------------------------------------

    # XLA's spatial partitioning (TensorFlow's behaviour, 2.17). Free memory of an end is a hole in its bins. What is
    # free between the ends is the gap, alone in the bins of its own set. The set of a chunk, in use or free, is
    # upstream's tag.

    cdef ChunkHandle allocate_this(self, ChunkHandle handle, uint64_t rounded, uint64_t requested, uint64_t stream,
                                   cbool indexed) noexcept nogil:
        """Like allocate_chunk, but from this free chunk, which is large enough."""
        cdef BinSet* wanted = &self.bin_sets[self.chunks[handle].bin_set]
        if not self.reserve(wanted.bins) or (indexed and not self.starts.reserve()):
            return NO_HOST_MEMORY
        self.remove_free_chunk_from_bin(wanted.bins, handle, True)
        return self.hand_out(&self.counters, wanted, handle, rounded, requested, stream, indexed, self.features)

    cdef inline ChunkHandle hand_out(self, Counters* counters, BinSet* wanted, ChunkHandle handle, uint64_t rounded,
                                     uint64_t requested, uint64_t stream, cbool indexed,
                                     uint32_t features) noexcept nogil:
        """Hands out a free chunk that has been taken out of its bin. Needs a reserve() before it."""
        cdef Chunk* chunk = &self.chunks[handle]
        cdef uint64_t left = chunk.size - rounded
        cdef cbool was_piece = (chunk.prev != NO_CHUNK) | (chunk.next != NO_CHUNK)  # a branch would be mispredicted
        cdef cbool counts_pieces = not features & OPTIONS or wanted.counts_pieces
        was_piece &= counts_pieces
        cdef cbool is_cut
        if features & CARVED:
            is_cut = False
        elif features & COUNTS:
            is_cut = left >= wanted.split_remainder and (not features & OPTIONS or rounded < wanted.cuts_below)
        else:
            is_cut = left >= wanted.split_remainder or (wanted.split_at_twice and left >= rounded)
        if is_cut:
            self.split_chunk(wanted.bins, handle, rounded,
                             self.times.clock if features & COUNTS else chunk.freed_at_count, features & OPTIONS)
            if features & PAGED:
                note_change(self, wanted, chunk.next)
        elif features & COUNTS and was_piece:
            self.books.usage.piece_used_up(wanted.kind)
        if features & PAGED:
            note_change(self, wanted, handle)
        chunk.requested_size = requested
        chunk.stream = stream
        chunk.allocation_id = self.records.next_allocation_id
        self.records.next_allocation_id += 1
        chunk.state = IN_USE
        if indexed:
            chunk.state = IN_USE | INDEXED
            self.starts.insert(chunk.ptr, handle)
        if chunk.size > counters.largest_alloc_size:
            counters.largest_alloc_size = chunk.size
        if not features & COUNTS:
            counters.num_allocs += 1
            counters.bytes_in_use += chunk.size
            counters.peak_bytes_in_use = max(counters.peak_bytes_in_use, counters.bytes_in_use)
            return handle
        self.books.usage.handed_out(wanted.kind, chunk.size, requested, left if is_cut else 0, was_piece, counts_pieces)
        if features & OPTIONS and chunk.size >= wanted.oversize:
            self.books.usage.oversize_allocations.raise_by(1)
        if self.books.history != NULL:
            self.note(HISTORY_ALLOC, chunk, requested)
        return handle

    cdef cbool index_chunk(self, ChunkHandle handle) noexcept nogil:
        """Makes a chunk's address known to handle_of. False: the host is out of memory."""
        if not self.starts.reserve():
            return False
        self.starts.insert(self.chunks[handle].ptr, handle)
        self.chunks[handle].state |= INDEXED
        return True

    cdef inline void unindex_chunk(self, ChunkHandle handle) noexcept nogil:
        if self.chunks[handle].state & INDEXED:
            self.starts.erase(self.chunks[handle].ptr, handle)
            self.chunks[handle].state &= ~<uint32_t>INDEXED

    cdef void prefetch_neighbours(self, ChunkHandle handle) noexcept nogil:
        """Prefetches both neighbours of a chunk that is about to be freed: the free looks at them."""
        cdef Chunk* chunk = &self.chunks[handle]
        prefetch(&self.chunks[chunk.prev if chunk.prev != NO_CHUNK else handle])
        prefetch(&self.chunks[chunk.next if chunk.next != NO_CHUNK else handle])

    cdef cbool free_chunk(self, ChunkHandle handle) noexcept nogil:
        """Gives a chunk in use back. False: the host is out of memory, and nothing has changed."""
        return free_and_merge(self, &self.counters, handle, self.features)

    cdef void restart_peaks(self) noexcept nogil:
        self.counters.peak_bytes_in_use = self.counters.bytes_in_use
        self.counters.peak_pool_bytes = self.counters.pool_bytes

    cdef Counters totals(self) noexcept nogil:
        """The counters. Under PyTorch's policy some of them are computed from `usage`."""
        cdef Counters totals = self.counters
        cdef Gauge gauge
        if self.books.usage != NULL:
            totals.num_allocs = self.books.usage.read(ACTIVE, BOTH_KINDS).allocated
            gauge = self.books.usage.read(ACTIVE_BYTES, BOTH_KINDS)
            totals.bytes_in_use = <uint64_t>gauge.current
            totals.peak_bytes_in_use = <uint64_t>gauge.peak
        return totals

    cdef void stop_using(self, ChunkHandle handle) noexcept nogil:
        """Marks a chunk as freed by its owner while another stream may still use it: it has no address any more, but it
        is not free."""
        cdef Chunk* chunk = &self.chunks[handle]
        self.unindex_chunk(handle)
        chunk.state = WAITING | (chunk.state & (MARKS | PLANNED))
        if self.books.usage != NULL:
            self.books.usage.given_up(self.bin_sets[chunk.bin_set].kind, chunk.size)
            if chunk.size >= self.bin_sets[chunk.bin_set].oversize:
                self.books.usage.oversize_allocations.lower(1)
        if self.books.history != NULL:
            self.note(HISTORY_FREE_REQUESTED, chunk, chunk.requested_size)
        chunk.allocation_id = -1
        self.counters.bytes_waiting += chunk.size

    cdef void use_again(self, ChunkHandle handle, int64_t allocation_id) noexcept nogil:
        """Undoes stop_using."""
        cdef Chunk* chunk = &self.chunks[handle]
        chunk.state = IN_USE | USED_ELSEWHERE | (chunk.state & (MARKS | PLANNED))
        if self.starts.reserve_at_all_costs():
            self.starts.insert(chunk.ptr, handle)
            chunk.state |= INDEXED
        chunk.allocation_id = allocation_id
        self.counters.bytes_waiting -= chunk.size
        if self.books.usage != NULL:
            self.books.usage.owned_again(self.bin_sets[chunk.bin_set].kind, chunk.size)
            if chunk.size >= self.bin_sets[chunk.bin_set].oversize:
                self.books.usage.oversize_allocations.raise_by(1)

    cdef ChunkHandle handle_of(self, uint64_t ptr) noexcept nogil:
        """The chunk in use that starts at `ptr`, or NO_CHUNK."""
        return bfc_find_start(self.starts, self.chunks, ptr)

    cdef ChunkHandle allocate_in_lane(self, Lane* lane, uint64_t requested) noexcept nogil:
        """A chunk for a request, if one of the lane's free chunks fits. Else NO_CHUNK, and nothing has changed."""
        cdef uint64_t rounded = self.sizes.round(requested)
        cdef uint64_t clock = self.times.clock
        cdef ChunkHandle handle = NO_CHUNK
        cdef uint32_t bin_set
        if self.plans.current != NULL and lane.thread == 0 and not lane.pool[0] | lane.pool[1]:
            return take_planned(self, rounded, requested, lane.stream)
        bin_set = find_lane(self, lane)
        if bin_set != NO_LANE:
            bin_set += is_large(rounded)
            if self.features == COUNTS:
                handle = find_and_hand_out(self, &self.counters, bin_set, rounded, requested, lane.stream, 0, True,
                                           COUNTS)
            else:
                handle = self.allocate_chunk(bin_set, rounded, requested, lane.stream, 0, True)
            if handle == NO_CHUNK and self.pages is not None:
                handle = self.pages.find_elsewhere(bin_set, rounded, requested, lane.stream, True)
        if handle >= NO_HOST_MEMORY:
            self.times.clock = clock      # the caller searches again, and that search counts
            return NO_CHUNK
        return handle

    cdef ChunkHandle allocate_in_range(self, Lane* lane, uint64_t requested) noexcept nogil:
        """Like allocate_in_lane, but rounds the request as BFC does."""
        cdef uint64_t rounded = round_up(requested, self.granularity)
        cdef ChunkHandle handle
        cdef uint32_t bin_set
        if self.plans.current != NULL and lane.thread == 0 and not lane.pool[0] | lane.pool[1]:
            return take_planned(self, rounded, requested, lane.stream)
        bin_set = find_lane(self, lane)
        if bin_set == NO_LANE:
            return NO_CHUNK
        bin_set += is_large(rounded)
        handle = self.allocate_chunk(bin_set, rounded, requested, lane.stream, 0, True)
        if handle == NO_CHUNK:
            handle = self.pages.find_elsewhere(bin_set, rounded, requested, lane.stream, True)
        return handle

    cdef cbool free_plain(self, uint64_t ptr) noexcept nogil:
        """Frees a chunk that only one stream has used and nobody views. Else returns False, and nothing has changed."""
        cdef ChunkHandle handle = bfc_take_start(self.starts, self.chunks, ptr, IN_USE | INDEXED, MARKS | PLANNED)
        if handle == NO_CHUNK:
            return False
        self.prefetch_neighbours(handle)
        if free_plain_chunk(self, handle):
            return True
        self.starts.insert(ptr, handle)     # where it was: there is room
        self.chunks[handle].state |= INDEXED
        return False

    cdef cbool free_unshared(self, ChunkHandle handle) noexcept nogil:
        """Frees a chunk in use, unless other streams use it, too: then returns False, and nothing has changed."""
        cdef uint64_t ptr = self.chunks[handle].ptr
        if self.chunks[handle].state & ~<uint32_t>(MARKS | PLANNED) != IN_USE | INDEXED:
            return not self.chunks[handle].state & USED_ELSEWHERE and self.free_chunk(handle)
        self.starts.erase(ptr, handle)
        if free_plain_chunk(self, handle):
            return True
        self.starts.insert(ptr, handle)     # where it was: there is room
        self.chunks[handle].state |= INDEXED
        return False

    cdef uint64_t largest_free(self) noexcept nogil:
        cdef uint64_t largest = 0
        cdef BinSet bin_set
        for bin_set in self.bin_sets:
            if not bin_set.asleep:
                largest = max(largest, bin_set.bins.largest())
        return largest

    # -- regions ------------------------------------------------------------------------------------------------------

    cdef cbool list_free(self, uint32_t bin_set, vector[ChunkHandle]& out) noexcept nogil:
        """The free chunks of a set in order of (size, order). False: the host is out of memory."""
        cdef vector[FreeChunk] found
        cdef FreeChunk entry
        if not self.bin_sets[bin_set].bins.collect(found) or not try_reserve(out, out.size() + found.size()):
            return False
        for entry in found:
            out.push_back(entry.handle)
        return True

    cdef cbool overlaps_region(self, uint64_t ptr, uint64_t size) noexcept nogil:
        cdef cmap[uint64_t, Region].iterator above = self.regions.upper_bound(ptr)
        return above != self.regions.end() and deref(above).second.ptr < ptr + size

    cdef cbool add_region(self, uint64_t ptr, uint64_t size, uint32_t bin_set, cbool join) noexcept nogil:
        """Adds a block as one free chunk. With `join`, it extends the region that ends where the block starts, if any.

        False: the host is out of memory, and nothing has changed.
        """
        cdef cbool is_at_ends = self.features & ENDS and bin_set <= UPPER_END
        cdef cbool is_shared = is_at_ends and self.two_ends.shared_begin == 0
        if is_at_ends:
            bin_set = GAP if is_shared else UPPER_END
        cdef Bins* bins = self.bin_sets[bin_set].bins
        if not self.reserve(bins):
            return False
        cdef cmap[uint64_t, Region].iterator before = self.regions.find(ptr)
        cdef ChunkHandle last = NO_CHUNK
        cdef Region region = Region(ptr, ptr + size, NO_CHUNK, 0)
        cdef uint32_t beside
        join = join and before != self.regions.end() and not self.bin_sets[bin_set].is_plan
        if join:
            beside = self.chunks[deref(before).second.first].bin_set
            join = beside == bin_set or (is_at_ends and beside <= GAP)
        if join:
            region = deref(before).second
            region.end = ptr + size
            last = self.chunk_at_end(&deref(before).second)
        if self.books.usage != NULL and not self.books.pool_usage.know(self.bin_sets[bin_set].lane.pool):
            return False
        if not self.enter_region(region):
            return False
        cdef ChunkHandle handle = self.take_slot()
        if last == NO_CHUNK:
            self.regions[region.end].first = handle
        else:
            self.regions.erase(ptr)
            self.chunks[last].next = handle
        self.fill_in(handle, ptr, size, bin_set, FREE)
        self.chunks[handle].prev = last
        counted_with(self, bin_set).regions += last == NO_CHUNK
        self.counters.pool_bytes += size
        self.counters.peak_pool_bytes = max(self.counters.peak_pool_bytes, self.counters.pool_bytes)
        if self.books.usage != NULL:
            self.books.usage.region_came(self.bin_sets[bin_set].kind, size, size >= self.bin_sets[bin_set].oversize)
            self.books.pool_usage.came(self.bin_sets[bin_set].lane.pool, self.bin_sets[bin_set].kind, size)
        if self.books.history != NULL:
            self.note(HISTORY_SEGMENT_ALLOC, &self.chunks[handle], size)
        if is_shared:
            self.two_ends.shared_begin = ptr
            self.two_ends.shared_end = ptr + size
        if is_at_ends:
            list_at_ends(self, coalesce_at_ends(self, handle, self.times.counter == NULL))
            return True
        handle = self.try_to_coalesce(bins, handle, self.times.counter == NULL, True)
        self.insert_free_chunk_into_bin(bins, handle, True)
        return True

    cdef cbool enter_region(self, Region region) noexcept nogil:
        """Enters a region as the youngest one. False: the host is out of memory, and nothing has changed."""
        cdef cbool is_last = self.regions.upper_bound(region.ptr) == self.regions.end()
        # One that is gone may have had its addresses, or its number.
        memset(self.order.recent, 0, sizeof(self.order.recent))
        if self.regions.empty():
            self.order.by_number = False
        if self.order.prefers_older and (not (is_last or self.order.by_number)
                                         or self.order.next_number == MOST_NUMBERS):
            if not order_by_number(self):
                return False
        region.number = self.order.next_number
        if not try_store(self.regions, region.end, region):
            return False
        self.order.next_number += 1
        return True

    cdef inline uint64_t order_of(self, ChunkHandle handle, cbool options) noexcept nogil:
        """The second half of a free chunk's place in its bins. While the addresses of regions rise with their numbers,
        which they do until a driver reuses an address, that is its address."""
        if options and self.order.by_number:
            return order_by_age(self, self.chunks[handle].ptr)
        if options and self.features & ENDS and self.chunks[handle].bin_set <= UPPER_END:
            return self.chunks[handle].ptr ^ self.two_ends.ends[self.chunks[handle].bin_set].turns
        return self.chunks[handle].ptr

    cdef void fill_in(self, ChunkHandle handle, uint64_t ptr, uint64_t size, uint32_t bin_set,
                      uint32_t state) noexcept nogil:
        """Writes the record of a chunk that has neither an owner nor neighbours."""
        cdef Chunk* chunk = &self.chunks[handle]
        chunk.ptr = ptr
        chunk.size = size
        chunk.requested_size = 0
        chunk.allocation_id = -1
        chunk.freed_at_count = 0
        chunk.stream = self.bin_sets[bin_set].lane.stream
        chunk.prev = chunk.next = NO_CHUNK
        chunk.bin_set = bin_set
        chunk.state = state

    cdef cbool list_regions(self, vector[Region]& out, cbool used_too) noexcept nogil:
        """Lists regions in address order, without ranges: all, or those without a chunk in use. False: the host is out
        of memory."""
        cdef cmap[uint64_t, Region].iterator it = self.regions.begin()
        cdef ChunkHandle handle
        while it != self.regions.end():
            handle = deref(it).second.first
            if self.bin_sets[self.chunks[handle].bin_set].is_range:
                postincrement(it)
                continue
            while not used_too and handle != NO_CHUNK and self.chunks[handle].state == FREE:
                handle = self.chunks[handle].next
            if (used_too or handle == NO_CHUNK) and not try_push_back(out, deref(it).second):
                return False
            postincrement(it)
        return True

    cdef void remove_region(self, Region region) noexcept nogil:
        """Forgets a region and whatever chunks it holds."""
        cdef ChunkHandle handle = region.first, following
        cdef Chunk* chunk = &self.chunks[handle]
        cdef BinSet* owner = &self.bin_sets[chunk.bin_set]
        cdef uint64_t size = region.end - region.ptr
        cdef cbool is_cut = chunk.size != size
        counted_with(self, chunk.bin_set).regions -= 1
        if region.ptr == self.two_ends.shared_begin:
            self.two_ends.shared_begin = self.two_ends.shared_end = 0
        if self.books.usage != NULL:
            self.books.usage.region_went(owner.kind, size, size >= owner.oversize)
            self.books.pool_usage.went(owner.lane.pool, owner.kind, size)
        if self.books.history != NULL:
            self.note(HISTORY_SEGMENT_FREE, chunk, size)
        if chunk.state == DIVIDED:
            forget_blocks(self, &region)
        while handle != NO_CHUNK:
            chunk = &self.chunks[handle]
            following = chunk.next
            if chunk.state == DIVIDED:
                self.delete_chunk(handle)
                break
            if self.books.usage != NULL:
                self.count_removed(owner, chunk, is_cut)
            if chunk.state == FREE:
                self.remove_free_chunk_from_bin(self.bins_of(handle), handle, True)
            else:
                if self.books.usage == NULL:
                    self.counters.bytes_in_use -= chunk.size
                self.books.owned.take_back(chunk)
                self.unindex_chunk(handle)
                if chunk.state & STATE == WAITING:
                    self.counters.bytes_waiting -= chunk.size
            self.delete_chunk(handle)
            handle = following
        self.counters.pool_bytes -= size
        self.regions.erase(region.end)

    cdef void count_removed(self, BinSet* owner, Chunk* chunk, cbool is_piece) noexcept nogil:
        if chunk.state == FREE:
            if is_piece:
                self.books.usage.piece_went(owner.kind, chunk.size)
            return
        self.books.usage.came_back(owner.kind, chunk.size, chunk.requested_size, 0, chunk.size, False,
                                   chunk.state & STATE == WAITING, owner.counts_pieces)

    cdef ChunkHandle chunk_at_end(self, Region* region) noexcept nogil:
        cdef ChunkHandle handle = region.first
        while self.chunks[handle].next != NO_CHUNK:
            handle = self.chunks[handle].next
        return handle

    # -- split, merge, coalesce ---------------------------------------------------------------------------------------

    cdef inline void split_chunk(self, Bins* bins, ChunkHandle handle, uint64_t size, uint64_t freed_at_count,
                                 cbool options) noexcept nogil:
        """Cuts the tail off as a free chunk of its own. It is not merged to the right: without timestamps no two
        neighbours are free, and with them TensorFlow does not merge it either."""
        self.insert_free_chunk_into_bin(bins, cut_chunk(self, handle, size, freed_at_count), options)

    cdef inline void join(self, ChunkHandle left, ChunkHandle right) noexcept nogil:
        cdef Chunk* survivor = &self.chunks[left]
        cdef Chunk* merged = &self.chunks[right]
        survivor.next = merged.next
        if merged.next != NO_CHUNK:
            self.chunks[merged.next].prev = left
        survivor.size += merged.size
        self.delete_chunk(right)

    cdef inline ChunkHandle try_to_coalesce(self, Bins* bins, ChunkHandle handle, cbool ignore_timestamps,
                                            cbool options) noexcept nogil:
        """Merges a free chunk, which is in no bin now, with its free neighbour on the right, then on the left."""
        cdef Chunk* chunk = &self.chunks[handle]
        if not ignore_timestamps and chunk.freed_at_count > 0:
            return handle
        cdef ChunkHandle right = chunk.next, left = chunk.prev
        if right != NO_CHUNK and self.chunks[right].state == FREE \
                and (ignore_timestamps or self.chunks[right].freed_at_count == 0):
            self.remove_free_chunk_from_bin(bins, right, options)
            merge(self, handle, right)
        if left != NO_CHUNK and self.chunks[left].state == FREE \
                and (ignore_timestamps or self.chunks[left].freed_at_count == 0):
            self.remove_free_chunk_from_bin(bins, left, options)
            self.chunks[left].requested_size = chunk.requested_size
            merge(self, left, handle)
            return left
        return handle

    cdef inline void insert_free_chunk_into_bin(self, Bins* bins, ChunkHandle handle, cbool options) noexcept nogil:
        bins.insert(self.chunks[handle].size, self.order_of(handle, options), handle)

    cdef inline void remove_free_chunk_from_bin(self, Bins* bins, ChunkHandle handle, cbool options) noexcept nogil:
        bins.erase(self.chunks[handle].size, self.order_of(handle, options))

    cdef void list_free_chunk(self, BinSet* owner, ChunkHandle handle) noexcept nogil:
        """Puts a free chunk into its bin, and into its range's bitmap. What is idle in a plan is in neither."""
        if owner.is_plan:
            return
        self.insert_free_chunk_into_bin(owner.bins, handle, True)
        if owner.bitmap != NULL:
            owner.bitmap.add(self.chunks[handle].ptr, self.chunks[handle].size, handle)

    cdef void unlist_free_chunk(self, BinSet* owner, ChunkHandle handle) noexcept nogil:
        if owner.is_plan:
            return
        self.remove_free_chunk_from_bin(owner.bins, handle, True)
        if owner.bitmap != NULL:
            owner.bitmap.remove(self.chunks[handle].ptr, self.chunks[handle].size)

    cdef inline Bins* bins_of(self, ChunkHandle handle) noexcept nogil:
        return self.bin_sets[self.chunks[handle].bin_set].bins

    # -- timestamped frees --------------------------------------------------------------------------------------------

    cdef SharedCounter set_timing_counter(self, SharedCounter counter):
        """Returns the old one, for the caller to drop later: under the lock, its finaliser would wait for that lock."""
        cdef SharedCounter before = self.timing_counter
        self.timing_counter = counter
        self.times.counter = <void*>counter if counter is not None else NULL
        self.times.notes_frees = self.times.counter != NULL or self.books.history != NULL
        return before

    cdef History* set_history(self, History* history) noexcept nogil:
        """Returns the old one, for the caller to delete without the lock."""
        history, self.books.history = self.books.history, history
        self.times.notes_frees = self.times.counter != NULL or self.books.history != NULL
        return history

    # -- records ------------------------------------------------------------------------------------------------------

    cdef inline cbool reserve(self, Bins* bins) noexcept nogil:
        """Makes room for one more chunk, so that nothing can fail half-way. False: the host is out of memory."""
        if self.records.free_slot == NO_CHUNK and self.chunk_count == self.records.capacity and not self.grow_chunks():
            return False
        return bins.reserve()

    cdef cbool grow_chunks(self) noexcept nogil:
        cdef size_t capacity = max(<size_t>FIRST_CHUNKS, self.records.capacity + self.records.capacity // 2)
        capacity = min(capacity, <size_t>NO_HOST_MEMORY)
        if capacity == self.records.capacity:
            return False
        if not bfc_make_room(self.pending, self.changed.bits, capacity):
            return False
        cdef size_t bytes = capacity * sizeof(Chunk) + CACHE_LINE
        cdef char* block = <char*>realloc(self.records.block, bytes)
        if block == NULL:
            return False
        cdef size_t skipped = <size_t>(round_up(<uint64_t>block, CACHE_LINE) - <uint64_t>block)
        if self.chunk_count and skipped != self.records.skipped:
            memmove(block + skipped, block + self.records.skipped, self.chunk_count * sizeof(Chunk))
        prefer_huge_pages(block, bytes)
        self.records.block = block
        self.chunks = <Chunk*>(block + skipped)
        self.records.skipped = skipped
        self.records.capacity = capacity
        return True

    cdef inline ChunkHandle take_slot(self) noexcept nogil:
        """An unused record, the most recently deleted one first. Needs a reserve() before it."""
        cdef ChunkHandle handle = self.records.free_slot
        if handle != NO_CHUNK:
            self.records.free_slot = self.chunks[handle].next
            return handle
        self.chunk_count += 1
        return <ChunkHandle>(self.chunk_count - 1)

    cdef inline void delete_chunk(self, ChunkHandle handle) noexcept nogil:
        self.chunks[handle].state = DELETED
        self.chunks[handle].allocation_id = -1
        self.chunks[handle].next = self.records.free_slot
        self.records.free_slot = handle

    # -- what can be seen ---------------------------------------------------------------------------------------------

    cdef cbool check_is_due(self) noexcept nogil:
        """Whether a debug build should check now: after every change of a small pool, and less often in a large one."""
        self.records.unchecked += 1
        if self.records.unchecked * CHUNKS_CHECKED_AT_EACH_CHANGE < self.chunk_count:
            return False
        self.records.unchecked = 0
        return True


# -- sets of bins -----------------------------------------------------------------------------------------------------

cdef uint32_t next_to_reopen(Pool pool) noexcept nogil:
    """A lane whose record may be reused, or NO_LANE. Of many lanes it looks at some, and next time at the next."""
    cdef uint32_t pairs = <uint32_t>pool.bin_sets.size() // 2, looked, pair
    for looked in range(min(pairs, <uint32_t>PAIRS_LOOKED_AT)):
        pair = (looked if pairs <= PAIRS_LOOKED_AT else pool.lanes.next_reopened + looked) % pairs
        if can_reopen(pool, 2 * pair):
            pool.lanes.next_reopened = pair + 1
            return 2 * pair
    pool.lanes.next_reopened += min(pairs, <uint32_t>PAIRS_LOOKED_AT)
    return NO_LANE


cdef cbool can_reopen(Pool pool, uint32_t pair) noexcept nogil:
    """Whether a lane has neither regions nor ranges, and is not about to get one. Without lanes, those of BFC's
    default pool are the first pair for good, and with two ends the second one, too."""
    cdef uint32_t kind, ranges
    if pair == pool.lanes.kept or (pair == 0 and not pool.features & (COUNTS | PAGED)):
        return False
    if pair == GAP and pool.features & ENDS:
        return False
    for kind in range(2):
        ranges = pool.bin_sets[pair + kind].ranges
        if pool.bin_sets[pair + kind].regions or (ranges and pool.bin_sets[ranges].regions):
            return False
    return pool.bin_sets[pair].lane.thread != IN_RANGES


cdef cbool open_pair(Pool pool) noexcept nogil:
    """Adds a set of bins for small chunks, and one for large ones. False: the host is out of memory."""
    cdef size_t before = pool.bin_sets.size()
    cdef uint32_t kind
    cdef BinSet opened
    for kind in range(2):
        opened = bin_set_of(new_bins(), kind)
        if opened.bins == NULL or not try_push_back(pool.bin_sets, opened):
            del opened.bins
            while pool.bin_sets.size() > before:
                del pool.bin_sets.back().bins
                pool.bin_sets.pop_back()
            return False
    return True


# -- allocate and free ------------------------------------------------------------------------------------------------

cdef inline ChunkHandle find_and_hand_out(Pool pool, Counters* counters, uint32_t bin_set, uint64_t rounded,
                                          uint64_t requested, uint64_t stream, uint64_t freed_before,
                                          cbool indexed, uint32_t features) noexcept nogil:
    """`counters`, here and below: the pool's, or a loop's copy, which can be in registers. `features`: the pool's,
    or a compile-time constant where a caller knows them."""
    return find_by(pool, counters, &pool.bin_sets[bin_set], bin_set, rounded, requested, stream, freed_before, indexed,
                   features)


cdef inline ChunkHandle find_by(Pool pool, Counters* counters, BinSet* wanted, uint32_t bin_set, uint64_t rounded,
                                uint64_t requested, uint64_t stream, uint64_t freed_before, cbool indexed,
                                uint32_t features) noexcept nogil:
    cdef FreeChunk found, in_ranges
    if features & ENDS and bin_set <= UPPER_END:
        return allocate_at_ends(pool, counters, bin_set, rounded, requested, stream, freed_before, 0, indexed)
    if not pool.reserve(wanted.bins) or (indexed and not pool.starts.reserve()):
        return NO_HOST_MEMORY
    if features & OPTIONS and wanted.looks_in_ranges:
        wanted = find_in_ranges_too(pool, wanted, rounded, &in_ranges)   # not &found: it should stay in registers
        if wanted == NULL:
            return in_ranges.handle
        found = in_ranges
    elif freed_before == 0:
        if features & OPTIONS:
            pool.times.clock += wanted.ticks
        if not wanted.bins.pop_best_fit(rounded, found):
            return NO_CHUNK
        if features & OPTIONS and found.size >= wanted.oversize and (
                rounded < wanted.oversize or found.size - rounded >= wanted.oversize_slack):
            wanted.bins.insert(found.size, found.order, found.handle)     # put back: no other fit is smaller
            return NO_CHUNK
    elif not pop_freed_before(pool, wanted.bins, rounded, freed_before, found):
        return NO_CHUNK
    if indexed:
        pool.starts.prefetch_slot(found.order)      # the address, mostly
    return pool.hand_out(counters, wanted, found.handle, rounded, requested, stream, indexed, features)


cdef BinSet* find_in_ranges_too(Pool pool, BinSet* wanted, uint64_t rounded, FreeChunk* found) noexcept nogil:
    """Takes the best fit among a lane's chunks, in regions and in ranges, out of its bin. Returns the set of bins
    that held it. NULL: the handle in `found` says why there is none."""
    cdef BinSet* ranges = &pool.bin_sets[wanted.ranges]
    cdef int where
    found.handle = NO_HOST_MEMORY
    if not ranges.bins.reserve():
        return NULL
    pool.times.clock += wanted.ticks
    where = find_in_both(wanted.bins[0], ranges.bins[0], pool.chunks, NO_CHUNK, UNMAPPED, rounded, found[0])
    if where == 2:
        wanted = ranges
    if where == 0 or (found.size >= wanted.oversize and (rounded < wanted.oversize
                                                         or found.size - rounded >= wanted.oversize_slack)):
        found.handle = NO_CHUNK
        return NULL
    wanted.bins.erase(found.size, found.order)
    return wanted


# -- two ends ---------------------------------------------------------------------------------------------------------

# XLA's spatial partitioning (TensorFlow's behaviour, 2.17). Free memory of an end is a hole in its bins. What is
# free between the ends is the gap, alone in the bins of its own set. The set of a chunk, in use or free, is
# upstream's tag.

cdef int use_ends(Pool pool, const uint64_t* slack, const cbool* descends) except -1:
    """From now on serves requests from two ends. Call it before there is a region: it adds the sets of bins.
    `slack` is what an end keeps of a hole (lower, upper) and of the gap (lower, upper)."""
    cdef uint32_t i
    for _ in range(4):      # the last is no chunk's: its rule splits nothing
        pool.add_bin_set(UNLIMITED, False)
    for i in range(UPPER_END + 1):
        pool.two_ends.ends[i] = End(pool.bin_sets[i].bins, ~<uint64_t>0 if descends[i] else 0, slack[i], slack[GAP + i])
    pool.two_ends.ends[GAP].bins = pool.bin_sets[GAP].bins
    pool.features |= OPTIONS | ENDS
    return 0


cdef inline ChunkHandle allocate_at_ends(Pool pool, Counters* counters, uint32_t end, uint64_t rounded,
                                         uint64_t requested, uint64_t stream, uint64_t freed_before,
                                         uint64_t alignment, cbool indexed) noexcept nogil:
    """The best fit among the end's own holes, or else a part of the gap. `alignment`: as in allocate_aligned, or 0.
    """
    if end == LOWER_END:    # the compiler makes two copies of it, each without further branches on the end
        return allocate_at_end(pool, counters, LOWER_END, rounded, requested, stream, freed_before, alignment, indexed)
    return allocate_at_end(pool, counters, UPPER_END, rounded, requested, stream, freed_before, alignment, indexed)


cdef inline ChunkHandle allocate_at_end(Pool pool, Counters* counters, uint32_t end, uint64_t rounded,
                                        uint64_t requested, uint64_t stream, uint64_t freed_before,
                                        uint64_t alignment, cbool indexed) noexcept nogil:
    cdef FreeChunk found
    cdef uint64_t slack = pool.two_ends.ends[end].slack
    # The gap needs no node: it is alone in its bins.
    if (alignment and not has_two_records(pool)) or not pool.reserve(pool.two_ends.ends[end].bins) or (
            indexed and not pool.starts.reserve()):
        return NO_HOST_MEMORY
    if not take_at_end(pool, pool.two_ends.ends[end].bins, end, rounded, freed_before, alignment, found):
        if not take_at_end(pool, pool.two_ends.ends[GAP].bins, end, rounded, freed_before, alignment, found):
            return NO_CHUNK
        slack = pool.two_ends.ends[end].gap_slack
    if end == LOWER_END:
        found.handle = carve_low(pool, found.handle, slack, rounded, alignment)
    else:
        found.handle = carve_high(pool, found.handle, slack, rounded, alignment)
    return pool.hand_out(counters, &pool.bin_sets[GAP + 1], found.handle, rounded, requested, stream, indexed,
                         OPTIONS | ENDS | CARVED)


cdef inline cbool fits_at_end(Pool pool, uint32_t end, ChunkHandle handle, uint64_t rounded, uint64_t freed_before,
                              uint64_t alignment) noexcept nogil:
    """Whether a free chunk that is large enough is so behind an aligned address, too."""
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef uint64_t start = chunk.ptr
    if freed_before and freed_before < chunk.freed_at_count:
        return False
    if alignment:
        start = round_up(start, alignment)
        if start + rounded > chunk.ptr + chunk.size:
            return False
    return end == UPPER_END or start + rounded <= pool.two_ends.shared_end


cdef inline ChunkHandle carve_low(Pool pool, ChunkHandle handle, uint64_t slack, uint64_t rounded,
                                  uint64_t alignment) noexcept nogil:
    """The part of a free chunk, in no bin now, that a request from the lower end gets. What lies before it becomes
    a hole of that end; what lies behind stays what it was."""
    cdef uint64_t freed_at = pool.chunks[handle].freed_at_count, before = 0, size, left
    cdef ChunkHandle rest
    if alignment:
        before = round_up(pool.chunks[handle].ptr, alignment) - pool.chunks[handle].ptr
    if before:
        rest = cut_chunk(pool, handle, before, freed_at)
        pool.chunks[handle].bin_set = LOWER_END
        list_at_ends(pool, handle)
        handle = rest
    size = min(pool.chunks[handle].size, pool.two_ends.shared_end - pool.chunks[handle].ptr)
    left = size - rounded
    if left >= slack or left >= rounded:
        size = rounded
    if pool.chunks[handle].size > size:
        list_at_ends(pool, cut_chunk(pool, handle, size, freed_at))
    pool.chunks[handle].bin_set = LOWER_END
    return handle


cdef inline ChunkHandle carve_high(Pool pool, ChunkHandle handle, uint64_t slack, uint64_t rounded,
                                   uint64_t alignment) noexcept nogil:
    """The part of a free chunk, in no bin now, that a request from the upper end gets. What lies before it stays
    what it was; what lies behind becomes a hole of that end."""
    cdef uint64_t freed_at = pool.chunks[handle].freed_at_count, ptr = pool.chunks[handle].ptr, first = ptr
    cdef uint64_t before, left
    cdef ChunkHandle rest
    if alignment:
        first = round_up(ptr, alignment)
    before = pool.chunks[handle].size - rounded
    left = before - (first - ptr)
    if alignment:
        before = ((ptr + before) & ~(alignment - 1)) - ptr
    if left < slack and left < rounded:
        before = first - ptr
    if before:
        rest = cut_chunk(pool, handle, before, freed_at)
        list_at_ends(pool, handle)
        handle = rest
    pool.chunks[handle].bin_set = UPPER_END
    if alignment:
        left = pool.chunks[handle].size - rounded
        if left and (left >= slack or left >= rounded):
            list_at_ends(pool, cut_chunk(pool, handle, rounded, freed_at))
    return handle


cdef void list_at_ends(Pool pool, ChunkHandle handle) noexcept nogil:
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef End* owner = &pool.two_ends.ends[chunk.bin_set]
    owner.bins.insert(chunk.size, chunk.ptr ^ owner.turns, handle)


cdef void unlist_at_ends(Pool pool, ChunkHandle handle) noexcept nogil:
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef End* owner = &pool.two_ends.ends[chunk.bin_set]
    owner.bins.erase(chunk.size, chunk.ptr ^ owner.turns)


cdef void return_to_gap(Pool pool, ChunkHandle handle) noexcept nogil:
    """Lets a chunk of an end that has become free belong to the gap if nothing of its end lies between the two."""
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef ChunkHandle towards = chunk.next if chunk.bin_set == LOWER_END else chunk.prev
    if towards != NO_CHUNK and pool.chunks[towards].bin_set == chunk.bin_set:
        return
    # a region of the upper end alone has no gap: there is nothing of another end in it
    if towards != NO_CHUNK or pool.two_ends.shared_begin <= chunk.ptr < pool.two_ends.shared_end:
        chunk.bin_set = GAP


cdef ChunkHandle coalesce_at_ends(Pool pool, ChunkHandle handle, cbool ignore_timestamps) noexcept nogil:
    """As try_to_coalesce. Holes of one end stay such; anything else that merges becomes the gap."""
    cdef ChunkHandle right = pool.chunks[handle].next, left = pool.chunks[handle].prev
    if not ignore_timestamps and pool.chunks[handle].freed_at_count > 0:
        return handle
    if right != NO_CHUNK and may_join_at_ends(pool, handle, right, ignore_timestamps):
        unlist_at_ends(pool, right)
        if pool.chunks[right].bin_set != pool.chunks[handle].bin_set:
            pool.chunks[handle].bin_set = GAP
        merge(pool, handle, right)
    if left != NO_CHUNK and may_join_at_ends(pool, handle, left, ignore_timestamps):
        unlist_at_ends(pool, left)
        if pool.chunks[left].bin_set != pool.chunks[handle].bin_set:
            pool.chunks[left].bin_set = GAP
        pool.chunks[left].requested_size = pool.chunks[handle].requested_size
        merge(pool, left, handle)
        return left
    return handle


cdef inline cbool may_join_at_ends(Pool pool, ChunkHandle one, ChunkHandle other,
                                   cbool ignore_timestamps) noexcept nogil:
    """Two parts of the gap always join: upstream ends the process where it finds itself with two gaps."""
    return pool.chunks[other].state == FREE and (
        ignore_timestamps or pool.chunks[other].freed_at_count == 0
        or (pool.chunks[one].bin_set == GAP and pool.chunks[other].bin_set == GAP))


cdef cbool pop_freed_before(Pool pool, Bins* bins, uint64_t rounded, uint64_t freed_before,
                            FreeChunk& found) noexcept nogil:
    cdef cbool some = bins.lower_bound(rounded, 0, found)
    while some and freed_before < pool.chunks[found.handle].freed_at_count:
        some = bins.lower_bound(found.size, found.order + 1, found)
    if some:
        bins.erase(found.size, found.order)
    return some


cdef inline cbool free_plain_chunk(Pool pool, ChunkHandle handle) noexcept nogil:
    """The same, made for what a call mostly frees: a chunk that is in use, and no more. It has been taken out of
    the table of starts."""
    if pool.chunks[handle].state & ~<uint32_t>INDEXED == IN_USE and not pool.times.notes_frees:
        if pool.features == 0:
            return free_and_merge(pool, &pool.counters, handle, PLAIN)
        if pool.features == COUNTS:
            return free_and_merge(pool, &pool.counters, handle, PLAIN | COUNTS)
    pool.chunks[handle].state &= ~<uint32_t>INDEXED
    return pool.free_chunk(handle)


cdef inline cbool free_and_merge(Pool pool, Counters* counters, ChunkHandle handle,
                                 uint32_t features) noexcept nogil:
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef BinSet* owner = &pool.bin_sets[chunk.bin_set]
    if not features & PLAIN and chunk.state & PLANNED:
        return free_place(pool, handle)
    if features & PAGED and owner.is_range and owner.bitmap == NULL:
        return free_among_pages(pool, counters, handle)
    if not owner.bins.reserve():
        return False
    if not features & (COUNTS | PLAIN) and pool.times.notes_frees and not write_down_free(pool, handle):
        return False
    if not features & PLAIN:
        pool.books.owned.take_back(chunk)
        pool.unindex_chunk(handle)
    cdef cbool was_waiting = not features & PLAIN and chunk.state & STATE == WAITING
    if was_waiting:
        counters.bytes_waiting -= chunk.size
    if features & COUNTS:
        count_and_free(pool, counters, owner, handle, was_waiting, features)
        return True
    counters.bytes_in_use -= chunk.size
    chunk.allocation_id = -1
    chunk.state = FREE
    if features & PAGED and owner.bitmap != NULL:
        free_in_range(pool, counters, owner, handle)
    elif not features & PLAIN and pool.times.counter != NULL:
        chunk.freed_at_count = (<SharedCounter>pool.times.counter).next_count()
        pool.insert_free_chunk_into_bin(owner.bins, handle, features & ENDS)
    elif features & ENDS and (features & PLAIN or chunk.bin_set <= UPPER_END):
        return_to_gap(pool, handle)
        list_at_ends(pool, coalesce_at_ends(pool, handle, True))
    else:
        pool.insert_free_chunk_into_bin(owner.bins, pool.try_to_coalesce(owner.bins, handle, True, False), False)
    return True


cdef cbool write_down_free(Pool pool, ChunkHandle handle) noexcept nogil:
    """Writes down a free under BFC's policy: in the queue of timestamps, and in the history. False: the host is
    out of memory, and nothing has changed."""
    cdef cbool listed = pool.times.counter == NULL or try_push_back(pool.times.timestamped, handle)
    if listed and pool.books.history != NULL:
        pool.note_free(&pool.chunks[handle])
    return listed


cdef inline void note_change(Pool pool, BinSet* owner, ChunkHandle handle) noexcept nogil:
    """Notes that a chunk was handed out or freed: the bitmap of its range follows when somebody reads it. Most
    requests are hits, and need to know nothing of pages. Of small chunks nothing is noted."""
    pool.changed.bits[handle >> 6] |= <uint64_t>owner.kind << (handle & 63)
    pool.changed.any = True


cdef inline ChunkHandle find_among_pages(Pool pool, Counters* counters, uint32_t bin_set, uint64_t rounded,
                                         uint64_t requested, uint64_t stream) noexcept nogil:
    pool.counters = counters[0]
    cdef ChunkHandle handle = pool.pages.find_elsewhere(bin_set, rounded, requested, stream, False)
    counters[0] = pool.counters
    return handle


cdef inline cbool free_among_pages(Pool pool, Counters* counters, ChunkHandle handle) noexcept nogil:
    pool.counters = counters[0]
    cdef cbool done = pool.pages.free_view(handle)
    counters[0] = pool.counters
    return done


cdef inline void free_in_range(Pool pool, Counters* counters, BinSet* owner, ChunkHandle handle) noexcept nogil:
    cdef uint64_t ptr = pool.chunks[handle].ptr, size = pool.chunks[handle].size
    handle = pool.try_to_coalesce(owner.bins, handle, True, False)
    pool.insert_free_chunk_into_bin(owner.bins, handle, False)
    give_pages_back(pool, counters, owner, handle, ptr, size)


cdef inline void give_pages_back(Pool pool, Counters* counters, BinSet* owner, ChunkHandle handle, uint64_t ptr,
                                 uint64_t size) noexcept nogil:
    """Notes that these bytes, now a part of a free chunk, have become free. If pages of small chunks may have
    become wholly free, they go back at once to where they come from."""
    if owner.kind != SMALL:
        note_change(pool, owner, handle)
    elif pool.chunks[handle].size >= owner.bitmap.page_size():
        pool.counters = counters[0]
        pool.pages.move_back(handle, ptr, size)
        counters[0] = pool.counters


cdef inline void count_and_free(Pool pool, Counters* counters, BinSet* owner, ChunkHandle handle, cbool was_waiting,
                                uint32_t features) noexcept nogil:
    """The rest of a free where PyTorch's counts are kept."""
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef uint64_t ptr = chunk.ptr, size = chunk.size, requested = chunk.requested_size
    cdef ChunkHandle right = chunk.next, left = chunk.prev
    cdef int neighbours = 0
    if features & OPTIONS and not was_waiting and size >= owner.oversize:
        pool.books.usage.oversize_allocations.lower(1)
    if pool.books.history != NULL:
        pool.note_free(chunk)
    chunk.allocation_id = -1
    chunk.state = FREE
    if right != NO_CHUNK and pool.chunks[right].state == FREE:
        pool.remove_free_chunk_from_bin(owner.bins, right, features & OPTIONS)
        pool.join(handle, right)
        neighbours = 1
    if left != NO_CHUNK and pool.chunks[left].state == FREE:
        pool.remove_free_chunk_from_bin(owner.bins, left, features & OPTIONS)
        pool.chunks[left].requested_size = requested
        pool.join(left, handle)
        handle = left
        neighbours += 1
    chunk = &pool.chunks[handle]
    chunk.freed_at_count = pool.times.clock
    pool.insert_free_chunk_into_bin(owner.bins, handle, features & OPTIONS)
    cdef cbool is_piece = (chunk.prev != NO_CHUNK) | (chunk.next != NO_CHUNK)
    cdef cbool counts_pieces = not features & OPTIONS or owner.counts_pieces
    is_piece &= counts_pieces
    pool.books.usage.came_back(owner.kind, size, requested, neighbours, chunk.size, is_piece, was_waiting,
                               counts_pieces)
    if features & PAGED and owner.bitmap != NULL:
        give_pages_back(pool, counters, owner, handle, ptr, size)


# -- the places of plans ----------------------------------------------------------------------------------------------

cdef ChunkHandle take_place(Pool pool, uint32_t index, uint64_t rounded, uint64_t requested, uint64_t stream,
                            cbool indexed, uint32_t features) noexcept nogil:
    """The place of a request that comes as planned; `index` is its stream in the plan. Else NO_CHUNK, or
    NO_HOST_MEMORY, and nothing has changed."""
    if indexed and not pool.starts.reserve():
        return NO_HOST_MEMORY
    cdef int64_t place = pool.plans.current.take(index, rounded)
    if place < 0:
        return NO_CHUNK
    return hand_out_place(pool, pool.plans.current, pool.plans.current.first_record + <ChunkHandle>place, index,
                          rounded, requested, stream, indexed, features)


cdef ChunkHandle take_planned(Pool pool, uint64_t rounded, uint64_t requested, uint64_t stream) noexcept nogil:
    """What a hit does where there is a plan: a request that is not as planned takes the slow path."""
    cdef uint32_t index = pool.plans.current.stream_of(stream)
    if index == NO_STREAM or pool.plans.rest:
        return NO_CHUNK
    cdef ChunkHandle handle = take_place(pool, index, rounded, requested, stream, True, pool.features)
    return handle if handle < NO_HOST_MEMORY else NO_CHUNK


cdef ChunkHandle hand_out_place(Pool pool, PlanServer* plan, ChunkHandle handle, uint32_t index, uint64_t rounded,
                                uint64_t requested, uint64_t stream, cbool indexed, uint32_t features) noexcept nogil:
    """Hands out a place, or a guest's room, which the plan has noted as taken."""
    cdef Chunk* chunk = &pool.chunks[handle]
    chunk.size = rounded
    chunk.requested_size = requested
    chunk.stream = stream
    chunk.allocation_id = pool.records.next_allocation_id
    pool.records.next_allocation_id += 1
    chunk.bin_set = plan.bin_sets[index] + (features & COUNTS != 0 and is_large(rounded))
    chunk.state = IN_USE | PLANNED
    if indexed:
        chunk.state = IN_USE | PLANNED | INDEXED
        pool.starts.insert(chunk.ptr, handle)
    pool.counters.largest_alloc_size = max(pool.counters.largest_alloc_size, rounded)
    if not features & COUNTS:
        pool.counters.num_allocs += 1
        pool.counters.bytes_in_use += rounded
        pool.counters.peak_bytes_in_use = max(pool.counters.peak_bytes_in_use, pool.counters.bytes_in_use)
        return handle
    pool.books.usage.handed_out(is_large(rounded), rounded, requested, 0, False, True)
    if not features & PLAIN and pool.books.history != NULL:
        pool.note(HISTORY_ALLOC, chunk, requested)
    return handle


cdef cbool free_place(Pool pool, ChunkHandle handle) noexcept nogil:
    """Frees a block that lies in the region of a plan."""
    cdef PlanServer* plan = pool.plans.current
    if plan == NULL or not plan.is_place(handle):
        plan = plan_of(pool, handle)
    end_use(pool, handle)
    if plan.is_place(handle):
        plan.release(handle - plan.first_record)
        return True
    plan.remove_guest(handle)
    pool.delete_chunk(handle)
    return True


cdef PlanServer* plan_of(Pool pool, ChunkHandle handle) noexcept nogil:
    """The plan in whose region a block lies."""
    cdef PlanServer* plan
    for plan in pool.plans.all:
        if plan.contains(pool.chunks[handle].ptr):
            return plan
    return NULL


cdef inline void end_use(Pool pool, ChunkHandle handle) noexcept nogil:
    """Counts that a block of a plan is not in use any more."""
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef cbool was_waiting = chunk.state & STATE == WAITING
    if pool.books.history != NULL:
        pool.note_free(chunk)
    pool.books.owned.take_back(chunk)
    pool.unindex_chunk(handle)
    if was_waiting:
        pool.counters.bytes_waiting -= chunk.size
    count_place_freed(pool, chunk, was_waiting, pool.features)


cdef inline void count_place_freed(Pool pool, Chunk* chunk, cbool was_waiting, uint32_t features) noexcept nogil:
    if not features & COUNTS:
        pool.counters.bytes_in_use -= chunk.size
    else:
        pool.books.usage.came_back(is_large(chunk.size), chunk.size, chunk.requested_size, 0, chunk.size, False,
                                   was_waiting, True)
    chunk.allocation_id = -1
    chunk.state = PLACE


cdef void forget_blocks(Pool pool, Region* region) noexcept nogil:
    """Ends all blocks in the region of a plan, which is removed."""
    cdef PlanServer* plan
    cdef ChunkHandle handle
    cdef size_t i
    cdef int which
    for plan in pool.plans.all:
        for which in range(2):
            if not plan.present[which] or plan.address[which] != region.ptr:
                continue
            for i in range(plan.places()):
                handle = plan.first_record + <ChunkHandle>i
                if pool.chunks[handle].state != PLACE and plan.region_of(plan.offset_of(<int64_t>i)) == which:
                    free_place(pool, handle)
            i = plan.guests().size()
            while i > 0:
                i -= 1
                if plan.region_of(plan.guests()[i].offset) == which:
                    free_place(pool, plan.guests()[i].handle)
            plan.set_region(which, False, 0)


# -- parts of chunks ---------------------------------------------------------------------------------------------------

cdef cbool has_records(Pool pool, int count) noexcept nogil:
    """Whether there are so many unused records of chunks; the table grows if need be."""
    cdef size_t unused = pool.records.capacity - pool.chunk_count, capacity
    cdef ChunkHandle slot = pool.records.free_slot
    while slot != NO_CHUNK and unused < <size_t>count:
        unused += 1
        slot = pool.chunks[slot].next
    while unused < <size_t>count:       # it grows by a half each time
        capacity = pool.records.capacity
        if not pool.grow_chunks():
            return False
        unused += pool.records.capacity - capacity
    return True


cdef ChunkHandle cut(Pool pool, ChunkHandle handle, uint64_t size) noexcept nogil:
    """Cuts the tail off a chunk that is in no bin; the tail has the same state. Needs a record."""
    cdef ChunkHandle rest = pool.take_slot()
    cdef Chunk* chunk = &pool.chunks[handle]
    pool.fill_in(rest, chunk.ptr + size, chunk.size - size, chunk.bin_set, chunk.state)
    pool.chunks[rest].prev = handle
    pool.chunks[rest].next = chunk.next
    if chunk.next != NO_CHUNK:
        pool.chunks[chunk.next].prev = rest
    chunk.next = rest
    chunk.size = size
    return rest


cdef ChunkHandle carve(Pool pool, ChunkHandle handle, uint64_t start, uint64_t end, uint32_t state) noexcept nogil:
    """Gives a part of a free chunk another state; what lies before and behind it stays free. The part's handle, or
    NO_HOST_MEMORY, and then nothing has changed."""
    cdef BinSet* owner = &pool.bin_sets[pool.chunks[handle].bin_set]
    cdef ChunkHandle part = handle, rest
    cdef uint64_t requested = pool.chunks[handle].requested_size
    if not has_records(pool, 2) or not owner.bins.reserve():
        return NO_HOST_MEMORY
    pool.unlist_free_chunk(owner, handle)
    if end < pool.chunks[handle].ptr + pool.chunks[handle].size:
        rest = cut(pool, handle, end - pool.chunks[handle].ptr)
        pool.list_free_chunk(owner, rest)
    if start > pool.chunks[handle].ptr:
        part = cut(pool, handle, start - pool.chunks[handle].ptr)
        pool.chunks[handle].requested_size = 0
        pool.list_free_chunk(owner, handle)
    pool.chunks[part].requested_size = requested    # stale, as PyTorch's snapshots show it
    pool.chunks[part].state = state
    return part


# -- replay -----------------------------------------------------------------------------------------------------------

cdef size_t play(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil:
    """Runs events from `start` on, until `end` or until it cannot serve one. Returns the number of the event where
    it stopped. None of the events may be a RELEASE.

    Without lanes it answers as BFC does: all chunks stand in one set of bins, and a size is rounded to the
    granularity. It serves nothing while frees are written down.
    """
    if pool.times.notes_frees and pool.books.usage == NULL:
        return start
    cdef cbool plain = events.timeline == NULL and events.owner == NULL and events.pool == NULL
    if pool.plans.current != NULL:
        if events.lane.thread or events.lane.pool[0] | events.lane.pool[1]:
            return start        # a private pool: it has memory of its own
        if not plain or pool.books.history != NULL:
            return play_planned(pool, events, start, end, tally, pool.features & COUNTS)
        return (play_caching_planned if pool.books.usage != NULL else play_bfc_planned)(pool, events, start, end, tally)
    if not plain:
        return play_loop(pool, events, start, end, tally, pool.features)
    return loops[pool.features](pool, events, start, end, tally)


cdef TimelineRow row_after(Pool pool, Timeline* timeline, size_t event, uint64_t live) noexcept nogil:
    """The timeline's row for the state after an event."""
    return TimelineRow(event, live, used_now(pool), pool.counters.pool_bytes, pool.largest_free(),
                       timeline.refused, timeline.driver_calls)


cdef inline void watch(Pool pool, Timeline* timeline, size_t event, uint64_t live, cbool rises) noexcept nogil:
    """Adds an event to the timeline if the bytes are at an extreme: a new minimum if the next event allocates
    (`rises`), else a new maximum. Only an allocation can follow a minimum, and only a free a maximum."""
    if timeline.is_extreme(live, used_now(pool), rises):
        timeline.note_extreme(row_after(pool, timeline, event, live), rises)


cdef inline uint64_t used_now(Pool pool) noexcept nogil:
    """The bytes of the chunks in use."""
    return pool.counters.bytes_in_use if pool.books.usage == NULL else <uint64_t>pool.books.usage.active_bytes()


cdef inline size_t play_loop(Pool pool, Events* events, size_t start, size_t end, Tally* tally,
                             uint32_t features) noexcept nogil:
    """PLAIN among the features: no timeline is kept, and no event has an owner or a private pool."""
    cdef const uint8_t* op = events.op      # locals: what the loop stores might alias the struct
    cdef const uint32_t* number = events.number
    cdef const uint64_t* sizes = events.size
    cdef const uint16_t* streams = events.stream
    cdef cbool by_stream = events.by_stream
    cdef ChunkHandle* handles = events.handles
    cdef uint64_t* addresses = events.addresses
    cdef uint64_t live = tally.live, peak = tally.peak_live, size, rounded, granularity = pool.granularity
    cdef Lane lane = events.lane
    cdef Counters own = pool.counters   # a PLAIN loop is all that changes them meanwhile, but for `pages`
    cdef Counters* counters = &own if features & PLAIN else &pool.counters
    cdef uint32_t bin_set = 0, lane_set = NO_LANE   # no lane is opened or closed in this loop
    cdef size_t i = start
    cdef ChunkHandle handle
    while i < end:
        if pool.chunk_count > FITS_THE_CACHE:
            look_ahead(events, pool.chunks, pool.chunk_count, i)
        if not features & PLAIN and events.timeline != NULL and i > start:
            watch(pool, events.timeline, i - 1, live, op[i] == ALLOCATE)
        if op[i] == ALLOCATE:
            size = sizes[i]
            if size == 0 or (not features & PLAIN and not enter_pool(events, i, features, &lane, &lane_set)):
                break
            if features & (COUNTS | PAGED):     # there are lanes
                if lane_set == NO_LANE or (by_stream and lane.stream != streams[i]):
                    lane.stream = streams[i] if by_stream else lane.stream
                    lane_set = find_lane(pool, &lane)
                if lane_set == NO_LANE or size >= TOO_LARGE:
                    break
                rounded = pool.sizes.round(size) if features & COUNTS else round_up(size, granularity)
                bin_set = lane_set + is_large(rounded)
            else:
                rounded = round_up(size, granularity)
                bin_set = end_of(events, i, features)
            handle = find_and_hand_out(pool, counters, bin_set, rounded, size, streams[i], 0, False, features)
            if features & PAGED and handle == NO_CHUNK:
                handle = find_among_pages(pool, counters, bin_set, rounded, size, streams[i])
            if handle >= NO_HOST_MEMORY:
                if features & OPTIONS and handle == NO_CHUNK:
                    pool.times.clock -= pool.bin_sets[bin_set].ticks    # the caller's next search counts
                break
            if not features & PLAIN and events.owner != NULL:
                pool.set_owner(handle, events.owner[i])
            handles[number[i]] = handle
            addresses[i] = pool.chunks[handle].ptr
            live += size
            peak = max(peak, live)
        elif handles[number[i]] != NO_CHUNK:
            size = play_free(pool, counters, handles[number[i]], features)
            if size == 0:
                break
            live -= size
            handles[number[i]] = NO_CHUNK
        i += 1
    if features & PLAIN:
        pool.counters = own
    tally[0] = Tally(live, peak)
    return i


cdef inline uint64_t play_free(Pool pool, Counters* counters, ChunkHandle handle, uint32_t features) noexcept nogil:
    """Frees an allocation of a replay. Returns the bytes that were asked for. 0: its chunk is not simply in use, or
    the host is out of memory."""
    if pool.chunks[handle].state & ~<uint32_t>(0 if features & PLAIN else MARKS) != IN_USE:
        return 0
    cdef uint64_t size = pool.chunks[handle].requested_size
    return size if free_and_merge(pool, counters, handle, features) else 0


cdef inline size_t play_planned(Pool pool, Events* events, size_t start, size_t end, Tally* tally,
                                uint32_t features) noexcept nogil:
    """Like play_loop, where there is a plan: serves what comes as planned."""
    cdef const uint8_t* op = events.op      # locals, as in play_loop
    cdef const uint32_t* number = events.number
    cdef const uint64_t* sizes = events.size
    cdef const uint16_t* streams = events.stream
    cdef ChunkHandle* handles = events.handles
    cdef uint64_t* addresses = events.addresses
    cdef uint64_t live = tally.live, peak = tally.peak_live, size, rounded, granularity = pool.granularity
    cdef cbool has_lanes = features & COUNTS != 0
    cdef uint64_t lane = events.lane.stream
    cdef uint32_t index = NO_STREAM, known = 0
    cdef ChunkHandle handle
    cdef size_t i = start
    while i < end:
        if not features & PLAIN and events.timeline != NULL and i > start:
            watch(pool, events.timeline, i - 1, live, op[i] == ALLOCATE)
        if op[i] == ALLOCATE:
            size = sizes[i]
            if size == 0 or size >= TOO_LARGE or (not features & PLAIN and events.pool != NULL and events.pool[i]):
                break
            if index == NO_STREAM or known != streams[i]:
                known = streams[i]
                lane = known if events.by_stream or not has_lanes else lane
                index = pool.plans.current.stream_of(lane)
            if index == NO_STREAM:
                break
            rounded = pool.sizes.round(size) if has_lanes else round_up(size, granularity)
            handle = take_place(pool, index, rounded, size, known, False, features)
            if handle >= NO_HOST_MEMORY:
                break
            if not features & PLAIN and events.owner != NULL:
                pool.set_owner(handle, events.owner[i])
            handles[number[i]] = handle
            addresses[i] = pool.chunks[handle].ptr
            live += size
            peak = max(peak, live)
        elif handles[number[i]] != NO_CHUNK:
            size = play_planned_free(pool, handles[number[i]], features)
            if size == 0:
                break
            live -= size
            handles[number[i]] = NO_CHUNK
        i += 1
    tally.live = live
    tally.peak_live = peak
    return i


cdef inline uint64_t play_planned_free(Pool pool, ChunkHandle handle, uint32_t features) noexcept nogil:
    """As play_free, where there is a plan."""
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef uint64_t size = chunk.requested_size
    if features & PLAIN and chunk.state == IN_USE | PLANNED and pool.plans.current.is_place(handle):
        pool.plans.current.release(handle - pool.plans.current.first_record)
        count_place_freed(pool, chunk, False, features)
        return size
    if chunk.state & ~<uint32_t>(MARKS | PLANNED) != IN_USE:
        return 0
    return size if pool.free_chunk(handle) else 0


# -- regions ----------------------------------------------------------------------------------------------------------

cdef inline BinSet* counted_with(Pool pool, uint32_t bin_set) noexcept nogil:
    """The set of bins that a region counts in. Those of two ends count in one: their first chunk changes sides."""
    return &pool.bin_sets[GAP if pool.features & ENDS and bin_set <= GAP else bin_set]


cdef cbool order_by_number(Pool pool) noexcept nogil:
    """Sorts free chunks by their regions' numbers from now on, until no region is left: the addresses do not rise
    with the numbers any more. False: the host is out of memory, and nothing has changed."""
    cdef vector[FreeChunk] entries
    cdef BinSet bin_set
    cdef size_t most = 0, i
    for bin_set in pool.bin_sets:
        most = max(most, bin_set.bins.count())
    if pool.regions.size() >= MOST_NUMBERS or not try_reserve(entries, most) or not number_again(pool.regions):
        return False
    pool.order.next_number = <uint32_t>pool.regions.size()
    pool.order.by_number = True
    pool.features |= OPTIONS
    for bin_set in pool.bin_sets:
        entries.clear()
        bin_set.bins.collect(entries)   # there is room
        for i in range(entries.size()):
            entries[i].order = pool.order_of(entries[i].handle, True)
        bin_set.bins.sort_again(entries)
    return True


cdef inline uint64_t order_by_age(Pool pool, uint64_t ptr) noexcept nogil:
    """A free asks up to three times, each time for a chunk of one region, and would search the map each time."""
    cdef Region* recent = &pool.order.recent[ptr >> REGION_BITS & (RECENT_REGIONS - 1)]
    if ptr - recent.ptr >= recent.end - recent.ptr:
        recent[0] = deref(pool.regions.upper_bound(ptr)).second
    return <uint64_t>recent.number << OFFSET_BITS | (ptr - recent.ptr) >> SECTOR_BITS


# -- split, merge, coalesce -------------------------------------------------------------------------------------------

cdef inline ChunkHandle cut_chunk(Pool pool, ChunkHandle handle, uint64_t size, uint64_t freed_at_count) noexcept nogil:
    """The same, but the tail is in no bin."""
    cdef ChunkHandle rest_handle = pool.take_slot()
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef Chunk* rest = &pool.chunks[rest_handle]
    rest.ptr = chunk.ptr + size
    rest.size = chunk.size - size
    rest.requested_size = chunk.requested_size      # the old value stays in both, and PyTorch's snapshots show it
    rest.allocation_id = -1
    rest.freed_at_count = freed_at_count
    rest.stream = chunk.stream
    rest.prev = handle
    rest.next = chunk.next
    rest.bin_set = chunk.bin_set
    rest.state = FREE
    chunk.size = size
    chunk.next = rest_handle
    if rest.next != NO_CHUNK:
        pool.chunks[rest.next].prev = rest_handle
    return rest_handle


cdef inline void merge(Pool pool, ChunkHandle left, ChunkHandle right) noexcept nogil:
    pool.chunks[left].freed_at_count = max(pool.chunks[left].freed_at_count, pool.chunks[right].freed_at_count)
    pool.join(left, right)


# -- records ----------------------------------------------------------------------------------------------------------

cdef inline cbool has_two_records(Pool pool) noexcept nogil:
    """Makes room for two more chunks: before an aligned one, and behind it. False: the host is out of memory."""
    return pool.chunk_count + 2 <= pool.records.capacity or pool.grow_chunks()


# -- the loops of replays ---------------------------------------------------------------------------------------------

# Each is a function of its own: as parts of one function, the compiler kept less of each in registers.

ctypedef size_t (*Loop)(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil


cdef size_t play_bfc(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil:
    return play_loop(pool, events, start, end, tally, PLAIN)


cdef size_t play_bfc_options(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil:
    return play_loop(pool, events, start, end, tally, PLAIN | OPTIONS)


cdef size_t play_bfc_paged(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil:
    return play_loop(pool, events, start, end, tally, PLAIN | PAGED)


cdef size_t play_bfc_planned(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil:
    return play_planned(pool, events, start, end, tally, PLAIN)


cdef size_t play_caching_planned(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil:
    return play_planned(pool, events, start, end, tally, PLAIN | COUNTS)


cdef size_t play_caching(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil:
    return play_loop(pool, events, start, end, tally, PLAIN | COUNTS)


cdef size_t play_caching_options(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil:
    return play_loop(pool, events, start, end, tally, PLAIN | COUNTS | OPTIONS)


cdef size_t play_caching_paged(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil:
    return play_loop(pool, events, start, end, tally, PLAIN | COUNTS | OPTIONS | PAGED)


cdef size_t play_bfc_ends(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil:
    return play_loop(pool, events, start, end, tally, PLAIN | OPTIONS | ENDS)


cdef Loop[2 * ENDS] loops      # by the pool's features
loops[0] = play_bfc
loops[COUNTS] = play_caching
loops[OPTIONS] = play_bfc_options
loops[COUNTS | OPTIONS] = play_caching_options
loops[OPTIONS | ENDS] = play_bfc_ends
loops[PAGED] = loops[PAGED | OPTIONS] = play_bfc_paged
loops[PAGED | COUNTS] = loops[PAGED | COUNTS | OPTIONS] = play_caching_paged
