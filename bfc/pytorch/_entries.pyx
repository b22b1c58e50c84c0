"""A snapshot's columns in the form that PyTorch's viewer expects: the entries it can follow, and the dict of each.

Fields, states and actions are those of PyTorch 2.11 (PyTorch's behaviour, 3.4).
"""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t

from bfc._core cimport HISTORY_OOM, HISTORY_SEGMENT_FREE, HISTORY_SEGMENT_UNMAP

from bfc.pytorch import words

cdef extern from "history.hpp":
    pass

cdef extern from "past.hpp" namespace "bfc":
    cdef cppclass Past:
        Past() except +
        void add_segment(uint64_t start, uint64_t size, uint64_t stream) except +
        void add_live(uint64_t address) except +
        void follow(const HistoryRecord* records, size_t count, vector[uint32_t]& kept) except +

#: The frames for memory that the allocator gave back on its own, without a call of empty_cache().
_OF_ITS_OWN = ((words.OUR_FILE, 0, words.OUR_OWN),)
_STATES = (words.INACTIVE, words.ALLOCATED, words.PENDING, words.INACTIVE)


cdef uint64_t requested_of(const ChunkRow* chunk) noexcept:
    """The requested bytes that a block reports; for a free block, those of its last use."""
    return chunk.requested_size if chunk.state in (ROW_IN_USE, ROW_WAITING) else chunk.last_requested_size


cdef class SharedFrames:
    """Makes lists of frames. Equal lists are one object, which keeps a long history small."""

    def __cinit__(self):
        self.made, self.by_id = {}, {}

    cdef list of(self, tuple frames):
        found = self.by_id.get(<size_t><void*>frames)
        if found is not None:
            return found
        found = self.made.get(frames)
        if found is None:
            found = []
            for filename, line, name in frames:
                found.append({"filename": str(filename), "line": int(line), "name": str(name)})
            self.made[frames] = found
        self.by_id[<size_t><void*>frames] = found
        return found


cdef class Columns:
    """The rows of a snapshot, and the entries of its history that the viewer can undo from the final regions on.

    The viewer stops with an error if it undoes an entry and finds no segment, or no block. So an entry about memory
    that was in no segment at that time is left out. (A pool's own snapshot has its segments only, and some kinds of
    entries may not have been recorded.) If an entry contradicts the regions, it and all earlier entries are left out.
    """

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

    def segments(self, device, SharedFrames shared not None):
        """The dicts of the segments."""
        cdef const RegionRow* row
        cdef Sums sums
        cdef size_t i
        found = []
        for i in range(self.region_count):
            row = &self.region_rows[i]
            if row.flags & ASLEEP:
                continue
            sums = self.sums_of(i)
            found.append({
                "device": device,
                "address": row.ptr,
                "total_size": row.size,
                "allocated_size": sums.allocated,
                "active_size": sums.active,
                "requested_size": sums.requested,
                "stream": row.stream,
                "segment_type": str(self.regions.kinds[row.kind]),
                "segment_pool_id": (row.pool[0], row.pool[1]),
                "is_expandable": bool(row.flags & IN_RANGE),
                "frames": shared.of(self.frames_of(self.regions.region_frames, i)),
                "blocks": self.blocks(i, shared),
            })
        return found

    def blocks(self, size_t region, SharedFrames shared not None):
        """The dicts of a segment's blocks."""
        cdef const ChunkRow* row
        cdef uint32_t j
        cdef list frames = self.regions.chunk_frames
        found = []
        for j in range(self.first_chunk(region), self.region_rows[region].chunks_end):
            row = &self.chunk_rows[j]
            found.append({
                "address": row.ptr,
                "size": row.size,
                "requested_size": requested_of(row),
                "state": _STATES[row.state],
                "frames": shared.of(self.frames_of(frames, j)),
            })
        return found

    def entries(self, SharedFrames shared not None):
        """The dicts of the entries that are kept, oldest first. Their time never decreases: if the clock was set back,
        it stands still until the clock has caught up."""
        cdef const HistoryRecord* row
        cdef int64_t latest = 0
        cdef size_t i = self.kept.size()
        cdef list found = []
        cdef tuple actions = tuple(map(str, self.history.actions)), nowhere = (0, 0)
        while i:
            i -= 1
            row = &self.records[self.kept[i]]
            latest = max(latest, row.time_us)
            found.append({
                "action": actions[row.action],
                "device_free" if row.action == HISTORY_OOM else "addr": row.addr,
                "size": row.size,
                "stream": row.stream,
                "time_us": latest,
                "compile_context": "N/A",
                "user_metadata": str(self.history.owners[row.owner]) if row.owner else "",
                "pool_id": (row.pool[0], row.pool[1]) if row.pool[0] or row.pool[1] else nowhere,
                "frames": shared.of(self.frames_of_entry(self.kept[i])),
            })
        return found
