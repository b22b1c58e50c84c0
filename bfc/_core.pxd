"""The pool's data layout: read this page first.

A *region* is one block from a sub-allocator. *Chunks* tile it: in use or free, linked to their neighbours in address
order, named by a *handle* (an index, never a pointer). Free chunks stand in a set of *bins* ordered by (size, order),
where the order is the address, or under a policy that prefers older regions, the age of the region and the place in it.
A pool knows integers only. It calls no device, holds no Python object, and runs without the GIL, which the compiler
checks. docs/walk.md follows one allocation and one free through here.
"""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

ctypedef uint32_t ChunkHandle

cdef enum:
    NO_CHUNK = 0xFFFFFFFF           # nothing fits, or no neighbour
    NO_HOST_MEMORY = 0xFFFFFFFE     # the bookkeeping could not grow; nothing has changed
    MINIMUM_SIZE = 256              # every chunk starts at a multiple of this

cdef enum ChunkState:
    DELETED                         # a record on the slot list
    FREE                            # listed in one bin
    IN_USE
    WAITING                         # freed by its owner, while another stream may still use it
    UNMAPPED                        # reserved addresses without memory; in no bin, and not merged with free chunks
    LEAVING                         # free memory of a range that is being unmapped, or that could not be; in no bin
    DIVIDED                         # the region of a plan: the blocks in it have records that are no neighbours
    PLACE                           # the record of a place in a plan that no block has; in no bin and in no region
    MAPPED_ELSEWHERE                # its pages are in use at other addresses; in no bin, and not merged with anything

cdef struct Chunk:                  # 64 bytes, one cache line
    uint64_t ptr
    uint64_t size
    uint64_t requested_size         # what the caller asked for
    int64_t allocation_id           # > 0 and never used twice; -1 where the chunk is not in use
    uint64_t freed_at_count         # when it was freed, by the timing counter or by the pool's clock; or 0
    uint64_t stream
    ChunkHandle prev                # the neighbours in the same region; in a deleted record `next` is the next slot
    ChunkHandle next
    uint32_t bin_set
    uint32_t state                  # a ChunkState, the bits below

cdef enum:
    STATE = 0xFF                    # the bits of Chunk.state that hold the ChunkState; the others:
    USED_ELSEWHERE = 0x100          # a stream other than the chunk's own may use it: see record_stream
    INDEXED = 0x200                 # its address is in the table of starts
    EXPORTED = 0x400                # another object holds a view of its memory
    COUNTED = 0x800                 # set and cleared while the lock is held, to detect a chunk that is listed twice
    PLANNED = 0x1000                # it lies in the region of a plan, and has no neighbours
    TRACED = 0x2000                 # Python's tracemalloc knows of it
    OWNER_SHIFT = 16                # from this bit up: its owner's number while it is in use or WAITING; 0: nobody
    MARKS = 0xFFFF2000              # TRACED and the owner: the bits that are cleared when the chunk goes out of use

cdef extern from "pool_sets.hpp" namespace "bfc" nogil:
    cdef cppclass PoolSets:
        cbool enter(uint32_t pair, const uint64_t* pool) noexcept
        uint32_t first(const uint64_t* pool) noexcept
        uint32_t next(uint32_t pair) noexcept
    const uint32_t NO_PAIR "bfc::PoolSets::kNone"


# What is declared in forward.hpp and parts.hpp has a header of its own (bins.hpp, starts.hpp, ...), which the modules
# that look inside or call its functions name.
cdef extern from "forward.hpp" namespace "bfc" nogil:
    cdef struct FreeChunk:
        uint64_t size
        uint64_t order
        uint32_t handle

    cdef cppclass Bins:
        Bins() except +
        cbool reserve()
        void insert(uint64_t size, uint64_t order, uint32_t handle)
        void erase(uint64_t size, uint64_t order)
        cbool lower_bound(uint64_t size, uint64_t order, FreeChunk& out)
        cbool pop_best_fit(uint64_t size, FreeChunk& out)
        uint64_t largest()
        size_t count()
        size_t bytes()
        cbool list(vector[FreeChunk]& out)
        cbool collect(vector[FreeChunk]& out)
        void sort_again(vector[FreeChunk]& entries)

cdef extern from "parts.hpp" namespace "bfc" nogil:
    cdef cppclass Starts:
        cbool reserve()
        cbool reserve_at_all_costs()
        void prefetch_slot(uint64_t address)
        void insert(uint64_t address, uint32_t handle)
        void erase(uint64_t address, uint32_t handle)
        size_t count()
        size_t bytes()

cdef extern from "parts.hpp" namespace "bfc" nogil:
    cdef cppclass Reasons:
        cbool none()
        cbool has(uint32_t any_of)
        void put(uint32_t bit, cbool is_set)

cdef extern from "parts.hpp" namespace "bfc" nogil:
    cdef enum PendingReason:
        LOCK_TAKEN "bfc::kLockTaken"
        NOT_IDLE "bfc::kNotIdle"
        HOST_MEMORY_GONE "bfc::kNoHostMemory"
        DEVICE_FAILED "bfc::kDeviceFailed"

    cdef struct PendingFree:
        ChunkHandle handle
        uint32_t reason
        int64_t allocation_id

    cdef cppclass PendingFrees:
        void attach(Reasons* reasons, uint32_t bit)
        cbool reserve(size_t chunks)
        void add(ChunkHandle handle, int64_t allocation_id, uint32_t reason)
        size_t take(PendingFree* out, size_t room)
        size_t due()
        void try_failed_again()
        void clear()

cdef extern from "parts.hpp" namespace "bfc" nogil:
    cdef struct Tracing:
        unsigned int domain
        int (*tell)(unsigned int domain, uintptr_t ptr, size_t size) noexcept nogil
        int (*forget)(unsigned int domain, uintptr_t ptr) noexcept nogil

    cdef cppclass OwnedBytes:
        Tracing tracing
        cbool knows(uint32_t owner)
        cbool know(uint32_t owner)
        void give(Chunk* chunk, uint32_t owner)
        void take_back(const Chunk* chunk)
        void grew(const Chunk* chunk, uint64_t by)
        cbool copy(vector[uint64_t]& out)

cdef extern from "forward.hpp" namespace "bfc" nogil:
    cdef cppclass Gauge:
        int64_t current
        int64_t peak
        int64_t allocated
        int64_t freed
        void raise_by "raise"(int64_t amount)
        void lower(int64_t amount)

    cdef cppclass Usage:
        Usage() except +
        Gauge oversize_allocations
        Gauge oversize_segments
        int64_t num_device_alloc
        int64_t num_device_free
        void handed_out(int kind, int64_t size, int64_t requested, int64_t left, cbool was_piece, cbool counts_pieces)
        void piece_used_up(int kind)
        void given_up(int kind, int64_t size)
        void owned_again(int kind, int64_t size)
        void came_back(int kind, int64_t size, int64_t requested, int neighbours, int64_t merged_size, cbool is_piece,
                       cbool was_waiting, cbool counts_pieces)
        void piece_went(int kind, int64_t size)
        void came_apart(int kind, int64_t size, cbool was_piece)
        void region_came(int kind, int64_t size, cbool oversize)
        void region_went(int kind, int64_t size, cbool oversize)
        void memory_came(int kind, int64_t size)
        void memory_moved(int kind, int to, int64_t size)
        void memory_went(int kind, int64_t size)
        Gauge read(int group, int kind)
        int64_t active_bytes()
        void restart_peaks()
        void restart_totals()
        void restart_bytes_peak()
        void merge_bytes_peak(int64_t before)

    cdef struct PoolReserved:
        uint64_t first
        uint64_t second
        cbool has_had
        Gauge reserved[3]

    cdef cppclass PoolUsage:
        cbool know(const uint64_t* pool)
        void came(const uint64_t* pool, int kind, int64_t size)
        void went(const uint64_t* pool, int kind, int64_t size)
        cbool copy(vector[PoolReserved]& out)
        void restart_peaks()
        void restart_totals()

    const int BOTH_KINDS "bfc::Usage::kKinds"
    const int ACTIVE "bfc::kActive"
    const int ACTIVE_BYTES "bfc::kActiveBytes"

cdef extern from "forward.hpp" namespace "bfc" nogil:
    cdef enum HistoryAction:
        HISTORY_ALLOC "bfc::kAlloc"
        HISTORY_FREE_REQUESTED "bfc::kFreeRequested"
        HISTORY_FREE_COMPLETED "bfc::kFreeCompleted"
        HISTORY_SEGMENT_ALLOC "bfc::kSegmentAlloc"
        HISTORY_SEGMENT_FREE "bfc::kSegmentFree"
        HISTORY_SNAPSHOT "bfc::kSnapshot"
        HISTORY_OOM "bfc::kOom"
        HISTORY_SEGMENT_MAP "bfc::kSegmentMap"
        HISTORY_SEGMENT_UNMAP "bfc::kSegmentUnmap"
        HISTORY_ANNOTATE "bfc::kAnnotate"

    cdef struct HistoryRecord:
        uint64_t addr
        uint64_t size
        uint64_t stream
        uint64_t pool[2]
        int64_t time_us
        int64_t allocation_id
        uint32_t action
        uint32_t owner

    cdef cppclass History:
        History(size_t capacity, uint32_t skipped_actions) except +
        void add(HistoryRecord record)
        void set_owner(int64_t allocation_id, uint32_t owner)
        size_t size()
        cbool copy(vector[HistoryRecord]& out)

cdef extern from "forward.hpp" namespace "bfc" nogil:
    cdef struct TimelineRow:
        uint64_t event
        uint64_t live
        uint64_t in_use
        uint64_t reserved
        uint64_t largest_free
        uint64_t refused
        uint64_t driver_calls

    cdef cppclass Timeline:
        uint64_t refused
        uint64_t driver_calls
        cbool begin(size_t first, size_t end, size_t samples)
        size_t end()
        cbool is_fresh()
        void note(const TimelineRow& now, uint64_t peak_in_use, uint64_t peak_reserved)
        cbool is_extreme(uint64_t live, uint64_t in_use, cbool rises)
        void note_extreme(const TimelineRow& now, cbool rises)
        const vector[TimelineRow]& finish()

cdef extern from "forward.hpp" namespace "bfc" nogil:
    const uint32_t NO_PAGE "bfc::kNoPage"

    cdef cppclass PageBitmap:
        uint64_t page_size()
        uint64_t address_of(size_t slot)
        size_t slot_at(uint64_t address)
        size_t slots()
        cbool make_room(uint64_t end)
        uint32_t page_at(size_t slot)
        void set_page(size_t slot, uint32_t page)
        void take(uint64_t address, uint64_t size)
        void add(uint64_t address, uint64_t size, uint32_t chunk)
        void remove(uint64_t address, uint64_t size)
        void clear()
        cbool is_free(size_t slot)
        cbool are_free(size_t slot, size_t count)
        size_t count_free()
        uint32_t chunk_around(size_t slot)
        uint32_t chunk_at(size_t slot)
        void note_chunk(size_t slot, uint32_t chunk)
        size_t bytes()

cdef extern from "parts.hpp" namespace "bfc" nogil:
    cdef cppclass TorchSizes:
        uint64_t large_segment
        uint64_t granularity
        uint64_t largest_segment
        cbool divides
        uint8_t division_bits[16]
        uint64_t round(uint64_t size)
        uint64_t segment_for(uint64_t rounded)

    cbool is_large "bfc::TorchSizes::is_large"(uint64_t rounded)

cdef extern from "forward.hpp" namespace "bfc" nogil:
    cdef struct PlanGuest "bfc::PlanServer::Guest":
        uint64_t offset
        uint64_t size
        uint32_t handle

    cdef struct PlanPages "bfc::PlanServer::PageRun":
        int region
        uint32_t first
        uint32_t count

    cdef struct PlanArea "bfc::PlanServer::Area":
        uint64_t begin
        uint64_t end
        uint32_t stream

    cdef struct PlanCounts "bfc::PlanServer::Counts":
        uint64_t hits
        uint64_t hit_bytes
        uint64_t guests
        uint64_t guest_bytes
        uint64_t side
        uint64_t side_bytes
        uint64_t moved

    const uint32_t NO_STREAM "bfc::PlanServer::kNoStream"

    cdef cppclass PlanServer:
        PlanServer(const uint64_t* offsets, const uint64_t* sizes, size_t places, uint64_t base, uint64_t span,
                   const vector[uint64_t]& streams, uint64_t home) except +
        uint32_t first_record
        uint64_t address[2]
        cbool present[2]
        PlanCounts counts
        uint64_t departures
        uint64_t departed_at
        uint64_t departed_size
        int64_t departed_place
        int64_t departed_id
        vector[uint32_t] bin_sets
        size_t alive
        vector[uint64_t] missed
        uint64_t peak
        uint64_t passed
        uint64_t apart
        cbool in_step
        cbool begins_with_head
        cbool is_proven
        cbool is_waiting
        void note_passed(cbool as_planned)
        void add_area(PlanArea area) except +
        size_t add_sequence(uint32_t stream, const uint32_t* places, const uint32_t* ends, size_t count,
                            const uint8_t* once) except +
        void set_head(size_t sequence)
        cbool has_ended(size_t sequence)
        void resume_head(uint32_t stream, uint64_t size)
        void set_growths(const int64_t* numbers, const uint32_t* follows) except +
        void begin_lengths(const uint32_t* sequences, size_t count)
        void add_length(uint32_t sequence, uint32_t request, uint64_t unit, uint64_t longest, uint64_t recorded,
                        cbool is_clear) except +
        void end_lengths() except +
        void add_kind(const vector[uint32_t]& sequences, int64_t follower) except +
        int64_t turn(uint32_t stream, uint64_t size, uint64_t requested)
        void note_begun(int64_t kind)
        cbool note_ended()
        cbool is_mostly_over()
        cbool is_idle_for_long()
        cbool is_in_vain()
        uint64_t bytes_of(uint32_t stream, uint64_t length)
        cbool asks()
        uint64_t length_of(uint32_t stream, uint64_t requested)
        cbool is_too_long(uint32_t stream, uint64_t length)
        uint32_t number_of_length(uint32_t stream)
        void set_length(uint32_t stream, uint64_t length, const TorchSizes* sizes, uint64_t granularity)
        void take_over(PlanServer& other, const vector[uint32_t]& live)
        void set_pages(int shift) except +
        cbool has_pages()
        uint32_t pages(int region)
        void send_away(int region, uint32_t first, uint32_t count)
        void bring_back(int region, uint32_t first, uint32_t count)
        cbool is_away(int region, uint32_t page)
        cbool are_idle(int region, uint32_t first, uint32_t count)
        uint32_t row_begin(int region, uint32_t page)
        uint32_t alike_from(uint32_t stream, PlanPages run, cbool& is_own)
        PlanPages pages_for(uint32_t stream, uint64_t size)
        PlanPages away_for(uint32_t stream, uint64_t size)
        int absent_for(uint32_t stream, uint64_t size)
        cbool has_whole_head()
        uint32_t owner_of(int region, uint32_t page)
        size_t count_lendable(uint32_t stream)
        size_t choose(uint32_t stream, size_t wanted, cbool for_long, vector[PlanPages]& runs)
        size_t places()
        uint64_t region_size(int region)
        int region_of(uint64_t offset)
        int region_at(uint64_t ptr)
        uint64_t address_of(uint64_t offset)
        cbool contains(uint64_t ptr)
        cbool is_place(uint32_t handle)
        uint64_t offset_of(int64_t place)
        uint64_t size_of(int64_t place)
        uint32_t stream_of(uint64_t handle)
        uint32_t bind_stream(uint64_t handle)
        void set_region(int region, cbool is_present, uint64_t at)
        size_t streams()
        cbool is_bound(uint32_t stream)
        uint64_t handle_of(uint32_t stream)
        vector[uint64_t] bound() except +
        cbool is_empty(int region)
        void end()
        void begin(size_t sequence)
        int64_t take(uint32_t stream, uint64_t size)
        int64_t take_late(uint32_t stream, uint64_t size, uint64_t requested)
        void release(int64_t place)
        cbool reserve_guest()
        int64_t find_room(uint32_t stream, uint64_t size)
        int64_t any_room(uint32_t stream, uint64_t size)
        void add_guest(uint64_t offset, uint64_t size, uint32_t handle)
        void remove_guest(uint32_t handle)
        const vector[PlanGuest]& guests()
        cbool is_sound(const vector[uint32_t]& live)
        size_t bytes()

cdef enum:
    SMALL = 0                       # kinds of chunks, if the policy counts them separately
    LARGE = 1
    NO_LANE = 0xFFFFFFFF
    IN_RANGES = 0xFFFFFFFF          # a value of Lane.thread: the chunks of a lane that lie in ranges
    IN_PLANS = 0xFFFFFFFE           # another: those that lie in the regions of a plan

cdef extern from *:
    """
    static const uint64_t BFC_IN_REGIONS = uint64_t{1} << 63;
    """
    const uint64_t IN_REGIONS "BFC_IN_REGIONS"  # a bit of Lane.thread: its chunks lie in regions; other lanes map pages

cdef extern from *:
    """
    static const uint64_t BFC_UNLIMITED = ~uint64_t{0};
    static const uint64_t BFC_TOO_LARGE = uint64_t{1} << 60;
    """
    const uint64_t UNLIMITED "BFC_UNLIMITED"
    const uint64_t TOO_LARGE "BFC_TOO_LARGE"    # PyTorch refuses a request of this many bytes without trying it

cdef struct Lane:                   # in PyTorch's policy: free chunks of one stream in one private pool
    uint64_t pool[2]                # (0, 0): the default pool
    uint64_t stream
    uint64_t thread                 # 0, unless the handle names a different stream in each thread; or IN_RANGES

cdef struct BinSet:                 # a policy's answer: where a request may look, and when it splits what it finds
    Bins* bins
    uint64_t split_remainder        # split where at least this much is left over
    cbool split_at_twice            # or if the chunk is at least twice the request
    cbool counts_pieces             # whether PyTorch counts its split-off chunks: not if its regions are ranges
    cbool is_range                  # its regions are ranges: reserved addresses, part of which have no memory
    cbool looks_in_ranges           # a request looks in `ranges`, too
    uint32_t ranges                 # the set of bins for the lane's chunks of this kind in ranges; 0: there is none
    uint64_t oversize               # a chunk of at least this serves no smaller request, and is not split
    uint64_t oversize_slack         # and it serves a larger request only if less than this is left over
    uint64_t ticks                  # what a search adds to the pool's clock
    uint32_t kind
    uint32_t regions                # how many regions have their chunks in these bins
    Lane lane
    uint64_t cuts_below             # a request of at least this gets an unsplit chunk: `oversize`, or no limit
    uint64_t mapped_bytes           # in the ranges
    PageBitmap* bitmap                  # the slots of a range whose pages may have further addresses; else NULL
    cbool asleep                    # its ranges have no memory now, and are not counted as reserved
    uint64_t is_plan                # 1: its regions are those of plans. 128 bytes in all: an index is a shift

cdef struct Counters:               # TensorFlow's AllocatorStats; where PyTorch's are kept see Pool.totals
    int64_t num_allocs
    uint64_t bytes_in_use           # whole chunks, not what was asked for
    uint64_t peak_bytes_in_use
    uint64_t largest_alloc_size
    uint64_t pool_bytes
    uint64_t peak_pool_bytes
    uint64_t bytes_waiting          # the part of bytes_in_use that its owner has freed, and that waits for a stream


cdef struct Events:                 # a trace, and the arrays that its replay writes to
    const uint8_t* op               # ALLOCATE, DEALLOCATE or RELEASE
    const uint32_t* number          # the number of the allocation: an index into `handles`
    const uint64_t* size
    const uint16_t* stream
    ChunkHandle* handles            # by the number of the allocation; NO_CHUNK if it is not live
    uint64_t* addresses             # one for each event
    size_t count
    Lane lane                       # if the policy has lanes: the lane, except for its stream
    cbool by_stream                 # whether to take the stream from the trace
    const uint16_t* owner           # the owner of each allocation, by its number; NULL: none has an owner
    const uint16_t* pool            # the private pool of each event, by its number; NULL: none has one
    const uint64_t* pools           # the two numbers of the id of each pool
    const uint8_t* end              # the end that each event asks from; NULL: the lower one
    Timeline* timeline              # the figures over time; NULL: none are recorded

cdef enum:
    ALLOCATE = 0
    DEALLOCATE = 1
    RELEASE = 2                     # empties the cache: the pool's caller does that

cdef enum:                          # what a pool does beyond BFC: play() has a loop for each combination in use
    COUNTS = 1                      # keeps PyTorch's counts, and chunks of different lanes apart
    OPTIONS = 2                     # a lane may have ranges, an oversize limit or ticks, or orders are no addresses
    PAGED = 4                       # pages may have several addresses
    ENDS = 16                       # requests are served from two ends; OPTIONS, too
    CARVED = 32                     # of a call: the chunk is as large as it is to be
    PLAIN = 8                       # of a call: chunks in use are IN_USE and no more, and frees are not written down

cdef enum:                          # where there are two ends: the set of bins of a chunk says whose it is
    LOWER_END = 0
    UPPER_END = 1
    GAP = 2                         # the free memory between the ends: one chunk, which either may take from

cdef struct Tally:                  # requested bytes of a replay
    uint64_t live
    uint64_t peak_live


cdef class PoolPages:
    cdef cbool free_view(self, ChunkHandle handle) noexcept nogil
    cdef ChunkHandle find_elsewhere(self, uint32_t bin_set, uint64_t rounded, uint64_t requested, uint64_t stream,
                                    cbool indexed) noexcept nogil
    cdef cbool move_back(self, ChunkHandle handle, uint64_t ptr, uint64_t size) noexcept nogil


cdef class SharedCounter:
    cdef int64_t value
    cdef int64_t next_count(self) noexcept nogil


cdef struct Release:                # a call that empties the cache, in its thread
    const void* pool                # NULL: none
    int64_t number                  # the allocation_id in the history of segments that it frees; or 0


cdef extern from "pool_parts.hpp" namespace "bfc" nogil:
    cdef struct Region:
        uint64_t ptr
        uint64_t end
        ChunkHandle first
        uint32_t number

    cdef struct End:
        Bins* bins
        uint64_t turns
        uint64_t slack
        uint64_t gap_slack

    cdef cppclass ChunkRecords:
        void* block
        size_t skipped
        size_t capacity
        ChunkHandle free_slot
        int64_t next_allocation_id
        uint64_t unchecked

    enum:
        RECENT_REGIONS "bfc::RegionOrder::kRecent"

    cdef cppclass RegionOrder:
        uint32_t next_number
        cbool prefers_older
        cbool by_number
        Region recent[RECENT_REGIONS]

    cdef cppclass Lanes:
        PoolSets pool_sets
        uint32_t last
        uint32_t next_reopened
        uint32_t kept

    cdef cppclass Times:
        void* counter
        uint64_t safe_frontier
        vector[ChunkHandle] timestamped
        cbool notes_frees
        uint64_t clock

    cdef cppclass PoolBooks:
        Usage* usage
        PoolUsage* pool_usage
        History* history
        OwnedBytes owned

    cdef cppclass ChangedChunks:
        vector[uint64_t] bits
        cbool any

    cdef cppclass PoolPlans:
        PlanServer* current
        cbool rest
        vector[PlanServer*] all

    cdef cppclass TwoEnds:
        End ends[3]
        uint64_t shared_begin
        uint64_t shared_end


@cython.final
cdef class Pool:
    cdef Chunk* chunks
    cdef size_t chunk_count
    cdef ChunkRecords records           # the memory of `chunks`
    cdef uint64_t granularity           # a power of two from MINIMUM_SIZE on: what BFC rounds sizes up to
    cdef Starts starts                  # the chunks in use by address, except those of a replay in progress
    cdef vector[BinSet] bin_sets
    cdef cmap[uint64_t, Region] regions  # by end address
    cdef RegionOrder order
    cdef PendingFrees pending           # frees that were left to a later call: it has room for one a chunk
    cdef Counters counters
    cdef SharedCounter timing_counter   # None: frees have no timestamp
    cdef Times times
    cdef PoolBooks books
    cdef TorchSizes sizes
    cdef Lanes lanes
    cdef uint32_t features              # what applies of COUNTS, OPTIONS and PAGED
    cdef PoolPages pages                # the pages with several addresses; None: there are none
    cdef ChangedChunks changed
    cdef PoolPlans plans
    cdef TwoEnds two_ends

    cdef uint32_t add_bin_set(self, uint64_t split_remainder, bint split_at_twice) except? 0xFFFFFFFF
    cdef int use_lanes(self) except -1
    cdef uint32_t open_lane(self, Lane* lane) noexcept nogil
    cdef uint32_t open_ranges(self, uint32_t bin_set) noexcept nogil
    cdef Release begin_release(self, int64_t number) noexcept nogil
    cdef void end_release(self, Release before) noexcept nogil
    cdef void note(self, uint32_t action, Chunk* chunk, uint64_t size) noexcept nogil
    cdef void set_owner(self, ChunkHandle handle, uint32_t owner) noexcept nogil
    cdef void note_free(self, Chunk* chunk) noexcept nogil

    cdef ChunkHandle allocate_chunk(self, uint32_t bin_set, uint64_t rounded, uint64_t requested, uint64_t stream,
                                    uint64_t freed_before, cbool indexed) noexcept nogil
    cdef ChunkHandle allocate_aligned(self, uint32_t bin_set, uint64_t rounded, uint64_t requested, uint64_t stream,
                                      uint64_t freed_before, uint64_t alignment, cbool indexed) noexcept nogil
    cdef ChunkHandle allocate_by(self, BinSet* wanted, uint64_t rounded, uint64_t requested, uint64_t stream,
                                 uint64_t freed_before, uint64_t alignment, cbool indexed) noexcept nogil
    cdef ChunkHandle allocate_this(self, ChunkHandle handle, uint64_t rounded, uint64_t requested, uint64_t stream,
                                   cbool indexed) noexcept nogil
    cdef ChunkHandle hand_out(self, Counters* counters, BinSet* wanted, ChunkHandle handle, uint64_t rounded,
                              uint64_t requested, uint64_t stream, cbool indexed, uint32_t features) noexcept nogil
    cdef cbool index_chunk(self, ChunkHandle handle) noexcept nogil
    cdef void unindex_chunk(self, ChunkHandle handle) noexcept nogil
    cdef void prefetch_neighbours(self, ChunkHandle handle) noexcept nogil
    cdef cbool free_chunk(self, ChunkHandle handle) noexcept nogil
    cdef ChunkHandle allocate_in_lane(self, Lane* lane, uint64_t requested) noexcept nogil
    cdef ChunkHandle allocate_in_range(self, Lane* lane, uint64_t requested) noexcept nogil
    cdef cbool free_plain(self, uint64_t ptr) noexcept nogil
    cdef cbool free_unshared(self, ChunkHandle handle) noexcept nogil
    cdef ChunkHandle handle_of(self, uint64_t ptr) noexcept nogil
    cdef cbool enter_region(self, Region region) noexcept nogil
    cdef uint64_t order_of(self, ChunkHandle handle, cbool options) noexcept nogil
    cdef cbool add_region(self, uint64_t ptr, uint64_t size, uint32_t bin_set, cbool join) noexcept nogil
    cdef void fill_in(self, ChunkHandle handle, uint64_t ptr, uint64_t size, uint32_t bin_set,
                      uint32_t state) noexcept nogil
    cdef cbool list_free(self, uint32_t bin_set, vector[ChunkHandle]& out) noexcept nogil
    cdef cbool overlaps_region(self, uint64_t ptr, uint64_t size) noexcept nogil
    cdef cbool list_regions(self, vector[Region]& out, cbool used_too) noexcept nogil
    cdef void remove_region(self, Region region) noexcept nogil
    cdef SharedCounter set_timing_counter(self, SharedCounter counter)
    cdef History* set_history(self, History* history) noexcept nogil
    cdef uint64_t largest_free(self) noexcept nogil
    cdef void restart_peaks(self) noexcept nogil
    cdef Counters totals(self) noexcept nogil
    cdef void stop_using(self, ChunkHandle handle) noexcept nogil
    cdef void use_again(self, ChunkHandle handle, int64_t allocation_id) noexcept nogil
    cdef cbool check_is_due(self) noexcept nogil

    cdef Bins* bins_of(self, ChunkHandle handle) noexcept nogil
    cdef void count_removed(self, BinSet* owner, Chunk* chunk, cbool is_piece) noexcept nogil
    cdef cbool reserve(self, Bins* bins) noexcept nogil
    cdef cbool grow_chunks(self) noexcept nogil
    cdef ChunkHandle take_slot(self) noexcept nogil
    cdef void delete_chunk(self, ChunkHandle handle) noexcept nogil
    cdef void insert_free_chunk_into_bin(self, Bins* bins, ChunkHandle handle, cbool options) noexcept nogil
    cdef void remove_free_chunk_from_bin(self, Bins* bins, ChunkHandle handle, cbool options) noexcept nogil
    cdef void list_free_chunk(self, BinSet* owner, ChunkHandle handle) noexcept nogil
    cdef void unlist_free_chunk(self, BinSet* owner, ChunkHandle handle) noexcept nogil
    cdef void split_chunk(self, Bins* bins, ChunkHandle handle, uint64_t size, uint64_t freed_at_count,
                          cbool options) noexcept nogil
    cdef void join(self, ChunkHandle left, ChunkHandle right) noexcept nogil
    cdef ChunkHandle try_to_coalesce(self, Bins* bins, ChunkHandle handle, cbool ignore_timestamps,
                                     cbool options) noexcept nogil
    cdef ChunkHandle chunk_at_end(self, Region* region) noexcept nogil


cdef int use_ends(Pool pool, const uint64_t* slack, const cbool* descends) except -1
cdef void list_at_ends(Pool pool, ChunkHandle handle) noexcept nogil
cdef void unlist_at_ends(Pool pool, ChunkHandle handle) noexcept nogil
cdef void return_to_gap(Pool pool, ChunkHandle handle) noexcept nogil
cdef ChunkHandle coalesce_at_ends(Pool pool, ChunkHandle handle, cbool ignore_timestamps) noexcept nogil
cdef cbool has_records(Pool pool, int count) noexcept nogil
cdef ChunkHandle cut(Pool pool, ChunkHandle handle, uint64_t size) noexcept nogil
cdef ChunkHandle carve(Pool pool, ChunkHandle handle, uint64_t start, uint64_t end, uint32_t state) noexcept nogil
cdef size_t play(Pool pool, Events* events, size_t start, size_t end, Tally* tally) noexcept nogil
cdef TimelineRow row_after(Pool pool, Timeline* timeline, size_t event, uint64_t live) noexcept nogil
cdef ChunkHandle take_place(Pool pool, uint32_t index, uint64_t rounded, uint64_t requested, uint64_t stream,
                            cbool indexed, uint32_t features) noexcept nogil
cdef ChunkHandle hand_out_place(Pool pool, PlanServer* plan, ChunkHandle handle, uint32_t index, uint64_t rounded,
                                uint64_t requested, uint64_t stream, cbool indexed,
                                uint32_t features) noexcept nogil
cdef PlanServer* plan_of(Pool pool, ChunkHandle handle) noexcept nogil
cdef void forget_blocks(Pool pool, Region* region) noexcept nogil
cdef ChunkHandle take_planned(Pool pool, uint64_t rounded, uint64_t requested, uint64_t stream) noexcept nogil


cdef inline cbool is_same_lane(const Lane* one, const Lane* other) noexcept nogil:
    return (one.stream == other.stream and one.pool[1] == other.pool[1] and one.pool[0] == other.pool[0]
            and one.thread == other.thread)


cdef inline uint32_t find_lane(Pool pool, Lane* lane) noexcept nogil:
    """The index of the lane's set of bins for small chunks, or NO_LANE. Its set for large ones has the next index.

    A program asks for the same one again and again, and a pool has few."""
    cdef uint32_t i = pool.lanes.last
    if i < pool.bin_sets.size() and is_same_lane(&pool.bin_sets[i].lane, lane):
        return i
    i = pool.lanes.pool_sets.first(lane.pool)
    while i != NO_PAIR:
        if is_same_lane(&pool.bin_sets[2 * i].lane, lane):
            pool.lanes.last = 2 * i
            return 2 * i
        i = pool.lanes.pool_sets.next(i)
    return NO_LANE


cdef inline uint64_t round_up(uint64_t size, uint64_t granularity) noexcept nogil:
    return (size + granularity - 1) & ~(granularity - 1)
