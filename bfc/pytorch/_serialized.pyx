"""A snapshot's columns as PyTorch writes them: the entries that its viewer can follow, and the pickle, which is written
without a dict for each entry.

Fields, states and actions are those of PyTorch 2.11 to 2.15 (PyTorch's behaviour, 3.4).
"""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string cimport string
from libcpp.vector cimport vector

from bfc._core cimport HISTORY_OOM, HISTORY_SEGMENT_FREE, HISTORY_SEGMENT_UNMAP, HistoryRecord

from bfc.pytorch import words

cdef extern from "history.hpp":
    pass

cdef extern from "history_rewind.hpp" namespace "bfc":
    cdef cppclass Past:
        Past() except +
        void add_segment(uint64_t start, uint64_t size, uint64_t stream) except +
        void add_live(uint64_t address) except +
        void follow(const HistoryRecord* records, size_t count, vector[uint32_t]& kept) except +

cdef extern from "pickle.hpp" namespace "bfc":
    cdef cppclass Pickle:
        Pickle() except +
        const string& content()
        void reserve(size_t bytes) except +
        void none() except +
        void boolean(cbool value) except +
        void number(uint64_t value) except +
        void signed_number(int64_t value) except +
        void real(double value) except +
        void text(const string& utf8) except +
        uint32_t remember() except +
        void again(uint32_t number) except +
        uint32_t add_name(const string& utf8) except +
        void name(uint32_t index) except +
        void begin_list() except +
        void end_list() except +
        void begin_dict() except +
        void end_dict() except +
        void begin_tuple() except +
        void end_tuple() except +
        void pair(uint64_t first, uint64_t second) except +
        void next_item(size_t i) except +
        void end() except +

cdef extern from "columns.hpp" namespace "bfc" nogil:
    cdef struct ChunkRow:
        uint64_t ptr
        uint64_t size
        uint64_t requested_size
        uint64_t last_requested_size
        uint32_t state

    cdef struct RegionRow:
        uint64_t ptr
        uint64_t size
        uint64_t stream
        uint64_t pool[2]
        uint32_t chunks_end
        uint32_t kind
        uint32_t flags

    const uint32_t ROW_IN_USE "bfc::kRowInUse"
    const uint32_t ROW_WAITING "bfc::kRowWaiting"
    const uint32_t IN_RANGE "bfc::kInRange"
    const uint32_t ASLEEP "bfc::kAsleep"

cdef struct Sums:                   # of a segment, in bytes
    uint64_t allocated
    uint64_t active
    uint64_t requested

#: The frames for memory that the allocator gave back on its own, without a call of empty_cache().
_OF_ITS_OWN = ((words.OUR_FILE, 0, words.OUR_OWN),)


cdef uint64_t requested_of(const ChunkRow* chunk) noexcept:
    """The requested bytes that a block reports; for a free block, those of its last use."""
    return chunk.requested_size if chunk.state in (ROW_IN_USE, ROW_WAITING) else chunk.last_requested_size


cdef class Columns:
    """The rows of a snapshot, and the entries of its history that the viewer can undo from the final regions on.

    The viewer stops with an error if it undoes an entry and finds no segment, or no block. So an entry about memory
    that was in no segment at that time is left out. (A pool's own snapshot has its segments only, and some kinds of
    entries may not have been recorded.) If an entry contradicts the regions, it and all earlier entries are left out.
    """

    cdef object regions, history    # RegionColumns and HistoryColumns, which own the rows
    cdef const RegionRow* region_rows
    cdef const ChunkRow* chunk_rows
    cdef const HistoryRecord* records
    cdef size_t region_count
    cdef size_t record_count
    cdef vector[uint32_t] kept      # the records that the viewer can follow, the newest first

    def __init__(self, regions, history):
        if regions is None or history is None:
            raise TypeError("columns are made of regions and a history")
        self.regions, self.history = regions, history
        self.region_rows = <const RegionRow*>PyBytes_AS_STRING(<bytes?>regions.regions)
        self.chunk_rows = <const ChunkRow*>PyBytes_AS_STRING(<bytes?>regions.chunks)
        self.records = <const HistoryRecord*>PyBytes_AS_STRING(<bytes?>history.records)
        self.region_count = len(regions.regions) // sizeof(RegionRow)
        self.record_count = len(history.records) // sizeof(HistoryRecord)
        cdef Past past
        cdef size_t i
        cdef uint32_t j
        for i in range(self.region_count if self.record_count else 0):
            if self.region_rows[i].flags & ASLEEP:
                continue
            past.add_segment(self.region_rows[i].ptr, self.region_rows[i].size, self.region_rows[i].stream)
            for j in range(self.first_chunk(i), self.region_rows[i].chunks_end):
                if self.chunk_rows[j].state in (ROW_IN_USE, ROW_WAITING):
                    past.add_live(self.chunk_rows[j].ptr)
        # Entries that do not fit are left out: the viewer would stop at the first of them with an error.
        past.follow(self.records, self.record_count, self.kept)

    cdef uint32_t first_chunk(self, size_t region) noexcept:
        return self.region_rows[region - 1].chunks_end if region else 0

    cdef Sums sums_of(self, size_t region) noexcept:
        """The bytes of the active blocks, of those that their owners have not freed yet, and the requested bytes."""
        cdef Sums sums = Sums(0, 0, 0)
        cdef const ChunkRow* chunk
        cdef uint32_t j
        for j in range(self.first_chunk(region), self.region_rows[region].chunks_end):
            chunk = &self.chunk_rows[j]
            if chunk.state in (ROW_IN_USE, ROW_WAITING):
                sums.active += chunk.size
                sums.requested += chunk.requested_size
                sums.allocated += chunk.size if chunk.state == ROW_IN_USE else 0
        return sums

    cdef tuple frames_of(self, list frames, size_t i):
        return frames[i] if frames is not None else ()

    cdef tuple frames_of_entry(self, size_t i):
        """The frames of an entry. A segment that was freed for lack of memory must not look like an emptied cache."""
        cdef tuple frames = self.frames_of(self.history.frames, i)
        if not frames and self.records[i].action in (HISTORY_SEGMENT_FREE, HISTORY_SEGMENT_UNMAP):
            return _OF_ITS_OWN
        return frames


cdef enum:      # the names, in the order of _NAMES
    DEVICE, ADDRESS, TOTAL_SIZE, ALLOCATED_SIZE, ACTIVE_SIZE, REQUESTED_SIZE, STREAM, SEGMENT_TYPE, SEGMENT_POOL_ID
    IS_EXPANDABLE, FRAMES, BLOCKS, SIZE, STATE, ACTION, ADDR, DEVICE_FREE, TIME_US, COMPILE_CONTEXT, NO_CONTEXT
    USER_METADATA, NO_METADATA, POOL_ID, FILENAME, LINE, NAME
    FIRST_STATE

_NAMES = (
    "device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type",
    "segment_pool_id", "is_expandable", "frames", "blocks", "size", "state", "action", "addr", "device_free", "time_us",
    "compile_context", "N/A", "user_metadata", "", "pool_id", "filename", "line", "name",
    words.INACTIVE, words.ALLOCATED, words.PENDING, words.INACTIVE,
)

cdef enum:
    BYTES_OF_AN_ENTRY = 100


cdef string utf8_of(text) except *:
    return str(text).encode("utf-8", "surrogatepass")


def pickled(Columns columns not None, device, dict rest not None):
    """The dict of `Snapshot.to_torch` as a pickle, without making the dict. `rest` is what follows the history."""
    return Writer().whole(columns, device, rest)


cdef class Writer:
    """A pickle that is being written."""

    cdef Pickle out
    cdef dict lists             # the memo number of a list of frames, by the tuple of frames
    cdef dict lists_by_id       # the same by the identity of the tuple: a faster look-up
    cdef dict texts             # the memo number of a string in a frame

    def __cinit__(self):
        self.lists, self.lists_by_id, self.texts = {}, {}, {}
        for name in _NAMES:
            self.out.add_name(utf8_of(name))

    cdef bytes whole(self, Columns columns, device, dict rest):
        self.out.reserve(columns.kept.size() * BYTES_OF_AN_ENTRY)
        self.out.begin_dict()
        self.put("segments")
        self.put_segments(columns, device)
        self.put("device_traces")
        self.out.begin_list()
        # PyTorch's list has one history for each device, by its number.
        for _ in range(device):
            self.put([])
        self.put_entries(columns)
        self.out.end_list()
        for key, value in rest.items():
            self.put(key)
            self.put(value)
        self.out.end_dict()
        self.out.end()
        return self.out.content()

    cdef int put(self, value) except -1:
        """Writes any value of the plain types."""
        if value is None:
            self.out.none()
        elif isinstance(value, bool):
            self.out.boolean(value)
        elif isinstance(value, int):
            self.out.signed_number(value)
        elif isinstance(value, float):
            self.out.real(value)
        elif isinstance(value, str):
            self.out.text(utf8_of(value))
        elif isinstance(value, dict):
            self.out.begin_dict()
            for key, item in value.items():
                self.put(key)
                self.put(item)
            self.out.end_dict()
        elif isinstance(value, tuple):
            self.out.begin_tuple()
            for item in value:
                self.put(item)
            self.out.end_tuple()
        else:
            self.out.begin_list()
            for item in <list?>value:
                self.put(item)
            self.out.end_list()
        return 0

    cdef int put_number(self, uint32_t name, uint64_t value) except -1:
        self.out.name(name)
        self.out.number(value)
        return 0

    cdef int put_segments(self, Columns columns, uint64_t device) except -1:
        cdef const RegionRow* row
        cdef Sums sums
        cdef size_t i
        cdef list kinds = []
        for kind in columns.regions.kinds:
            kinds.append(self.out.add_name(utf8_of(kind)))
        self.out.begin_list()
        for i in range(columns.region_count):
            row = &columns.region_rows[i]
            # What sleeps has no memory: PyTorch's viewer would add it to what is reserved.
            if row.flags & ASLEEP:
                continue
            sums = columns.sums_of(i)
            self.out.next_item(i)
            self.out.begin_dict()
            self.put_number(DEVICE, device)
            self.put_number(ADDRESS, row.ptr)
            self.put_number(TOTAL_SIZE, row.size)
            self.put_number(ALLOCATED_SIZE, sums.allocated)
            self.put_number(ACTIVE_SIZE, sums.active)
            self.put_number(REQUESTED_SIZE, sums.requested)
            self.put_number(STREAM, row.stream)
            self.out.name(SEGMENT_TYPE)
            self.out.name(kinds[row.kind])
            self.out.name(SEGMENT_POOL_ID)
            self.out.pair(row.pool[0], row.pool[1])
            self.out.name(IS_EXPANDABLE)
            self.out.boolean(row.flags & IN_RANGE)
            self.put_frames(columns.frames_of(columns.regions.region_frames, i))
            self.put_blocks(columns, i)
            self.out.end_dict()
        self.out.end_list()
        return 0

    cdef int put_blocks(self, Columns columns, size_t region) except -1:
        cdef const ChunkRow* row
        cdef uint32_t first = columns.first_chunk(region), j
        cdef list frames = columns.regions.chunk_frames
        self.out.name(BLOCKS)
        self.out.begin_list()
        for j in range(first, columns.region_rows[region].chunks_end):
            row = &columns.chunk_rows[j]
            self.out.next_item(j - first)
            self.out.begin_dict()
            self.put_number(ADDRESS, row.ptr)
            self.put_number(SIZE, row.size)
            self.put_number(REQUESTED_SIZE, requested_of(row))
            self.out.name(STATE)
            self.out.name(FIRST_STATE + row.state)
            self.put_frames(columns.frames_of(frames, j))
            self.out.end_dict()
        self.out.end_list()
        return 0

    cdef int put_entries(self, Columns columns) except -1:
        """Writes the entries that are kept, oldest first. Their time never decreases: if the clock was set back, it
        stands still until the clock has caught up."""
        cdef const HistoryRecord* row
        cdef size_t count = columns.kept.size(), i
        cdef int64_t latest = 0
        cdef uint32_t first_action = 0
        for action in columns.history.actions:
            first_action = self.out.add_name(utf8_of(action))
        first_action -= <uint32_t>len(columns.history.actions) - 1
        self.out.begin_list()
        for i in range(count):
            row = &columns.records[columns.kept[count - 1 - i]]
            latest = max(latest, row.time_us)
            self.out.next_item(i)
            self.out.begin_dict()
            self.out.name(ACTION)
            self.out.name(first_action + row.action)
            self.put_number(DEVICE_FREE if row.action == HISTORY_OOM else ADDR, row.addr)
            self.put_number(SIZE, row.size)
            self.put_number(STREAM, row.stream)
            self.out.name(TIME_US)
            self.out.signed_number(latest)
            self.out.name(COMPILE_CONTEXT)
            self.out.name(NO_CONTEXT)
            self.out.name(USER_METADATA)
            if row.owner:
                self.put_text(columns.history.owners[row.owner])
            else:
                self.out.name(NO_METADATA)
            self.out.name(POOL_ID)
            self.out.pair(row.pool[0], row.pool[1])
            self.put_frames(columns.frames_of_entry(columns.kept[count - 1 - i]))
            self.out.end_dict()
        self.out.end_list()
        return 0

    cdef int put_frames(self, tuple frames) except -1:
        """Writes a list of frames. Equal lists are written once."""
        cdef uint32_t number
        self.out.name(FRAMES)
        found = self.lists_by_id.get(<size_t><void*>frames)
        if found is None:
            found = self.lists.get(frames)
        if found is not None:
            self.out.again(found)
            return 0
        self.out.begin_list()
        for filename, line, name in frames:
            self.out.begin_dict()
            self.out.name(FILENAME)
            self.put_text(filename)
            self.out.name(LINE)
            self.out.signed_number(line)
            self.out.name(NAME)
            self.put_text(name)
            self.out.end_dict()
        self.out.end_list()
        number = self.out.remember()
        self.lists[frames] = self.lists_by_id[<size_t><void*>frames] = number
        return 0

    cdef int put_text(self, text) except -1:
        found = self.texts.get(text)
        if found is not None:
            self.out.again(found)
            return 0
        self.out.text(utf8_of(text))
        self.texts[text] = self.out.remember()
        return 0
