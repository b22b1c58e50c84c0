"""The compiled parts of the planner: places, the exact search, the sweep that checks both, and the matcher."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stddef cimport size_t
from libc.stdint cimport UINT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.utility cimport move
from libcpp.vector cimport vector

from bfc._core cimport TorchSizes

cdef extern from "torch_sizes.hpp":     # what TorchSizes.round does
    pass

cdef extern from "plan_layout.hpp" namespace "bfc" nogil:
    cppclass PlanLayout:
        PlanLayout(size_t sections, uint32_t wall) except +
        uint64_t steps()
    cppclass PlanBlocks:
        const int32_t* first
        const int32_t* begin
        const int32_t* end
        const uint32_t* size
        int64_t* offset
    void take_place(PlanLayout& layout, const PlanBlocks& blocks, size_t block) except +
    cbool place_in_order_in "bfc::place_in_order"(
        PlanLayout& layout, const PlanBlocks& blocks, const int32_t* order, size_t count) except +

cdef extern from "plan_search.hpp" namespace "bfc" nogil:
    cppclass PlannedBlock:
        int32_t begin, end, size, life
    enum SearchAnswer "bfc::PlanSearch::Answer":
        kFits "bfc::PlanSearch::kFits"
        kImpossible "bfc::PlanSearch::kImpossible"
    enum SearchOrder "bfc::PlanSearch::Order":
        pass
    cppclass PlanSearch:
        PlanSearch(vector[PlannedBlock] blocks, int32_t sections, int32_t capacity) except +
        SearchAnswer solve(SearchOrder order, uint64_t steps) except +
        vector[int32_t] offsets

cdef extern from "plan_sweep.hpp" namespace "bfc" nogil:
    cppclass Overlap:
        int64_t first, second
    Overlap find_overlap_in "bfc::find_overlap"(
        size_t changes, const uint32_t* block, const uint8_t* is_birth, const uint64_t* offset,
        const uint64_t* size) except +

cdef extern from "plan_matcher.hpp" namespace "bfc" nogil:
    cppclass PlanMatcher:
        PlanMatcher(const uint64_t* sizes, size_t slots) except +
        int64_t match(uint64_t size, cbool smaller) noexcept

cdef enum:
    CHUNK = 1024        # blocks that are placed between two looks at signals

#: The orders that the exact search tries in turn.
SEARCH_ORDERS = 3


def place_in_order(const int32_t[::1] first, const int32_t[::1] begin, const int32_t[::1] end,
                   const uint32_t[::1] size, const int32_t[::1] order, int64_t[::1] offset, size_t sections, wall=None):
    """Places each block whose `offset` is negative, in the order given, at the lowest free place. Block i lives in the
    pieces first[i] up to first[i + 1], from a section `begin` up to `end`. None lies across `wall`. Returns how much
    work it was, in extents that were met, or -1 if one has no place below 2**32 units. A signal ends it."""
    cdef size_t count = size.shape[0], done = 0, now
    cdef PlanBlocks blocks
    cdef PlanLayout* layout
    cdef cbool fits = True
    if count == 0:
        return 0
    blocks.first, blocks.begin, blocks.end = &first[0], &begin[0], &end[0]
    blocks.size, blocks.offset = &size[0], &offset[0]
    layout = new PlanLayout(sections, UINT32_MAX if wall is None else wall)
    try:
        for now in range(count):
            if offset[now] >= 0:
                take_place(layout[0], blocks, now)
        while fits and done < count:
            now = min(count - done, <size_t>CHUNK)
            with nogil:
                fits = place_in_order_in(layout[0], blocks, &order[done], now)
            done += now
            PyErr_CheckSignals()
        return layout.steps() if fits else -1
    finally:
        del layout


def search(const int32_t[::1] begin, const int32_t[::1] end, const int32_t[::1] size, const int32_t[::1] life,
           int32_t sections, int32_t capacity, int order, uint64_t steps, int64_t[::1] offset):
    """Looks for places below `capacity`, and looks at about as many blocks as `steps` says at most. Returns True if it
    has written them to `offset`, False if there are none, and None if it has stopped."""
    cdef vector[PlannedBlock] blocks
    cdef PlannedBlock block
    cdef PlanSearch* made
    cdef SearchAnswer answer
    cdef size_t i
    for i in range(<size_t>size.shape[0]):
        block.begin, block.end, block.size, block.life = begin[i], end[i], size[i], life[i]
        blocks.push_back(block)
    made = new PlanSearch(move(blocks), sections, capacity)
    try:
        with nogil:
            answer = made.solve(<SearchOrder>order, steps)
        if answer == kFits:
            for i in range(<size_t>size.shape[0]):
                offset[i] = made.offsets[i]
    finally:
        del made
    return True if answer == kFits else False if answer == kImpossible else None


def find_overlap(const uint32_t[::1] block, const uint8_t[::1] is_birth, const uint64_t[::1] offset,
                 const uint64_t[::1] size):
    """The first two blocks with an address in common while both live, or None. The births and deaths are in the order
    of time, deaths first."""
    cdef Overlap found
    if block.shape[0] == 0:
        return None
    with nogil:
        found = find_overlap_in(block.shape[0], &block[0], &is_birth[0], &offset[0], &size[0])
    return None if found.first < 0 else (found.first, found.second)


def match(const uint64_t[::1] slots, const uint64_t[::1] requests, int64_t[::1] matched, bint smaller):
    """Writes the slot of each request to `matched`, -1 for one that has none. With `smaller`, a request may take the
    place of a slot that it fills at least half."""
    cdef PlanMatcher* matcher = new PlanMatcher(&slots[0] if slots.shape[0] else NULL, slots.shape[0])
    cdef size_t i
    try:
        with nogil:
            for i in range(<size_t>requests.shape[0]):
                matched[i] = matcher.match(requests[i], smaller)
    finally:
        del matcher


def as_torch_rounds(const uint64_t[::1] sizes, uint64_t[::1] rounded, uint8_t[::1] division_bits):
    """Writes the sizes as PyTorch's policy rounds them, with its setting roundup_power2_divisions."""
    cdef TorchSizes rules
    cdef size_t i
    for i in range(16):
        rules.division_bits[i] = division_bits[i]
        rules.divides |= division_bits[i] > 0
    for i in range(<size_t>sizes.shape[0]):
        rounded[i] = rules.round(sizes[i])
