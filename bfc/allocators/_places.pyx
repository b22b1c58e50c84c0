"""The places of plans in a pool: sets of bins and records for a plan that comes, goes or gets a region, and what a
request gets that does not come as planned. A hit and a free are in `_core.pyx`. All functions need the lock."""

from cython.operator cimport dereference as deref
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_push_back, try_reserve
from bfc._core cimport (
    DELETED, DIVIDED, IN_PLANS, LARGE, NO_CHUNK, NO_HOST_MEMORY, NO_LANE, NO_STREAM, OPTIONS, PLACE, UNLIMITED,
    ChunkHandle, Lane, PlanServer, Pool, TorchSizes, hand_out_place, is_large, take_place,
)

cdef extern from "bins.hpp":
    pass
cdef extern from "page_bitmap.hpp":
    pass
cdef extern from "plan_server.hpp":
    pass
cdef extern from "starts.hpp":
    pass
cdef extern from "torch_sizes.hpp":
    pass
cdef extern from "usage.hpp":
    pass


cdef ChunkHandle take_records(Pool pool, size_t count) noexcept nogil:
    """Takes so many unused records that follow each other from the list of them. NO_CHUNK: there are none, and nothing
    has changed."""
    cdef ChunkHandle handle = pool.records.free_slot, first, following
    cdef ChunkHandle* link = &pool.records.free_slot
    cdef size_t found = 0, end = 0
    while end < pool.chunk_count and found < count:
        found = found + 1 if pool.chunks[end].state == DELETED else 0
        end += 1
    if count == 0 or found < count:
        return NO_CHUNK
    first = <ChunkHandle>(end - count)
    while handle != NO_CHUNK:
        following = pool.chunks[handle].next
        if handle < first or handle >= end:
            link[0] = handle
            link = &pool.chunks[handle].next
        handle = following
    link[0] = NO_CHUNK
    return first


cdef ChunkHandle place_or_room(Pool pool, uint64_t rounded, uint64_t requested, uint64_t stream,
                               cbool indexed) noexcept nogil:
    """The place of a request, or a guest's room. NO_CHUNK: the policy serves it."""
    cdef uint32_t index = pool.plans.current.stream_of(stream)
    cdef ChunkHandle handle = NO_CHUNK
    cdef int64_t place
    if index == NO_STREAM:
        index = bind_stream(pool, stream)
    if index != NO_STREAM:
        pool.plans.current.resume_head(index, rounded)
        read_length(pool, index, requested)
        handle = take_place(pool, index, rounded, requested, stream, indexed, pool.features)
        if handle != NO_CHUNK:
            return handle
        place = pool.plans.current.take_late(index, rounded, requested)
        if place >= 0:
            return hand_out_place(pool, pool.plans.current, pool.plans.current.first_record + <ChunkHandle>place,
                                  index, rounded, requested, stream, indexed, pool.features)
        if pool.plans.current.departures == 1:
            pool.plans.current.departed_id = pool.records.next_allocation_id
        if is_large(rounded):
            handle = hand_out_room(pool, pool.plans.current, index, pool.plans.current.find_room(index, rounded),
                                   rounded, requested, stream, indexed)
    if handle == NO_CHUNK:
        pool.plans.current.counts.side += 1
        pool.plans.current.counts.side_bytes += rounded
    return handle


cdef void read_length(Pool pool, uint32_t index, uint64_t requested) noexcept nogil:
    """Lets the sizes of a step follow from its length, if this request tells it."""
    cdef uint64_t length = pool.plans.current.length_of(index, requested)
    cdef const TorchSizes* torch = NULL
    if length:
        if pool.books.usage != NULL:
            torch = &pool.sizes
        pool.plans.current.set_length(index, length, torch, pool.granularity)


cdef ChunkHandle hand_out_room(Pool pool, PlanServer* plan, uint32_t index, int64_t offset, uint64_t rounded,
                               uint64_t requested, uint64_t stream, cbool indexed) noexcept nogil:
    """Makes a guest of a request. NO_CHUNK: the offset is none. NO_HOST_MEMORY: nothing has changed."""
    if offset < 0:
        return NO_CHUNK
    if (indexed and not pool.starts.reserve()) or not plan.reserve_guest():
        return NO_HOST_MEMORY
    if pool.records.free_slot == NO_CHUNK and pool.chunk_count == pool.records.capacity and not pool.grow_chunks():
        return NO_HOST_MEMORY
    cdef ChunkHandle handle = pool.take_slot()
    plan.add_guest(<uint64_t>offset, rounded, handle)
    pool.fill_in(handle, plan.address_of(<uint64_t>offset), rounded, plan.bin_sets[index], PLACE)
    return hand_out_place(pool, plan, handle, index, rounded, requested, stream, indexed, pool.features)


cdef uint32_t set_of_region(Pool pool, PlanServer* plan, int region) noexcept nogil:
    """The set of bins of the range that is a plan's region, of a plan with pages."""
    return plan.bin_sets[plan.bin_sets.size() - 2 + region] + (pool.books.usage != NULL)


cdef PlanServer* plan_in(Pool pool, uint32_t bin_set, int* region) noexcept nogil:
    """The plan whose region this set of bins is for, of plans with pages."""
    cdef PlanServer* plan
    for plan in pool.plans.all:
        for region[0] in range(2):
            if plan.has_pages() and set_of_region(pool, plan, region[0]) == bin_set:
                return plan
    return NULL


cdef uint32_t bind_stream(Pool pool, uint64_t stream) noexcept nogil:
    """Lets a stream stand for one of the plan's, of which none stands for it yet. NO_STREAM: none is left."""
    cdef uint32_t index = pool.plans.current.bind_stream(stream), kind
    if index != NO_STREAM and pool.books.usage != NULL:
        for kind in range(2):
            pool.bin_sets[pool.plans.current.bin_sets[index] + kind].lane.stream = stream
    return index


cdef uint32_t open_plan_set(Pool pool, size_t number) noexcept nogil:
    """Opens two sets of bins for one stream of a plan; BFC uses the second. NO_LANE: the host is out of memory."""
    cdef uint32_t kind
    cdef Lane lane = Lane([0, 0], number, IN_PLANS)
    cdef uint32_t opened = pool.open_lane(&lane)
    if opened == NO_LANE:
        return NO_LANE
    if pool.books.usage == NULL:
        opened += LARGE
    for kind in range(2 if pool.books.usage != NULL else 1):
        pool.bin_sets[opened + kind].split_remainder = UNLIMITED
        pool.bin_sets[opened + kind].oversize = pool.bin_sets[opened + kind].cuts_below = UNLIMITED
        pool.bin_sets[opened + kind].looks_in_ranges = pool.bin_sets[opened + kind].is_range = False
        pool.bin_sets[opened + kind].counts_pieces = True
        pool.bin_sets[opened + kind].ticks = 0
        pool.bin_sets[opened + kind].is_plan = True
    pool.bin_sets[opened].regions += 1      # so that no other lane gets it meanwhile
    return opened


cdef void close_plan_sets(Pool pool, PlanServer* plan) noexcept nogil:
    cdef uint32_t opened, kind
    for opened in plan.bin_sets:
        if opened == NO_LANE:
            break
        pool.bin_sets[opened].regions -= 1
        for kind in range(2 if pool.books.usage != NULL else 1):
            pool.bin_sets[opened + kind].is_plan = False


cdef cbool add_plan(Pool pool, PlanServer* plan) noexcept nogil:
    """Opens sets of bins for a plan, and makes a record for each place, one behind the other. False: the host is
    out of memory."""
    cdef size_t i
    cdef int region
    for i in range(plan.bin_sets.size()):
        plan.bin_sets[i] = NO_LANE
    for i in range(plan.bin_sets.size()):
        plan.bin_sets[i] = open_plan_set(pool, i)
        if plan.bin_sets[i] == NO_LANE:
            close_plan_sets(pool, plan)
            return False
    if plan.has_pages():
        for region in range(2):
            pool.bin_sets[set_of_region(pool, plan, region)].is_range = True
            pool.bin_sets[set_of_region(pool, plan, region)].counts_pieces = False
        pool.features |= OPTIONS if pool.books.usage != NULL else 0
    cdef cbool has_room = try_reserve(pool.plans.all, pool.plans.all.size() + 1)
    cdef ChunkHandle first = take_records(pool, plan.places()) if has_room else NO_CHUNK
    while has_room and first == NO_CHUNK and pool.records.capacity - pool.chunk_count < plan.places():
        has_room = pool.grow_chunks()
    if not has_room:
        close_plan_sets(pool, plan)
        return False
    if first == NO_CHUNK:
        first = <ChunkHandle>pool.chunk_count
        pool.chunk_count += plan.places()
    plan.first_record = first
    for i in range(plan.places()):
        pool.fill_in(plan.first_record + <ChunkHandle>i, 0, 0, plan.bin_sets[0], PLACE)
    pool.plans.all.push_back(plan)
    return True


cdef void divide(Pool pool, PlanServer* plan, int region, uint64_t ptr) noexcept nogil:
    """Gives a region to a plan; the pool has it as one free chunk of a set of bins for plans."""
    cdef ChunkHandle handle = deref(pool.regions.upper_bound(ptr)).second.first
    pool.remove_free_chunk_from_bin(pool.bins_of(handle), handle, True)
    pool.chunks[handle].state = DIVIDED
    give_to_plan(pool, plan, region, ptr)


cdef void give_to_plan(Pool pool, PlanServer* plan, int region, uint64_t ptr) noexcept nogil:
    """Lets a plan use a region at an address."""
    plan.set_region(region, True, ptr)
    point_places(pool, plan, region)


cdef void point_places(Pool pool, PlanServer* plan, int region) noexcept nogil:
    """Writes the addresses of the places in a region into their records."""
    cdef size_t i
    for i in range(plan.places()):
        if plan.region_of(plan.offset_of(<int64_t>i)) == region:
            pool.chunks[plan.first_record + i].ptr = plan.address_of(plan.offset_of(<int64_t>i))


cdef void drop_plan(Pool pool, PlanServer* plan) noexcept nogil:
    """Forgets a plan that has no region any more."""
    cdef size_t i
    for i in range(pool.plans.all.size()):
        if pool.plans.all[i] == plan:
            pool.plans.all[i] = pool.plans.all.back()
            pool.plans.all.pop_back()
            break
    close_plan_sets(pool, plan)
    for i in range(plan.places()):
        pool.delete_chunk(plan.first_record + <ChunkHandle>i)
    if pool.plans.current == plan:
        pool.plans.current = NULL
    del plan


cdef cbool list_places(Pool pool, PlanServer* plan, int region, vector[uint32_t]& out) noexcept nogil:
    """The blocks in a region of a plan, in no order. False: the host is out of memory."""
    cdef size_t i
    cdef ChunkHandle handle
    for i in range(plan.places()):
        handle = plan.first_record + <ChunkHandle>i
        if pool.chunks[handle].state != PLACE and plan.region_of(plan.offset_of(<int64_t>i)) == region:
            if not try_push_back(out, <uint32_t>handle):
                return False
    for i in range(plan.guests().size()):
        if plan.region_of(plan.guests()[i].offset) == region:
            if not try_push_back(out, plan.guests()[i].handle):
                return False
    return True
