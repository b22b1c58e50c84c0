"""Stitching: where no free chunk is large enough, free pages that lie apart get a row of addresses of their own.

Each stream has two ranges of addresses, one for small chunks and one for large ones, which are filled with pages from
the front. A large request that no chunk fits takes pages of its stream that are free, and more of the device where they
are too few: it is served at the end of the range if that needs no more of them, or else through a *view* (_pages.pyx).
At the limit it takes free pages of other streams, and waits for what these have queued.

The transactions are those of _address_ranges.pyx. What the mapper has taken is `held`, as chunks that are LEAVING:
nobody else uses it meanwhile. While a tag sleeps, the records of its pages stay: which slots and views name which page.
Only the device's memory for them is gone. Views that nothing lives in are forgotten beforehand; pages that become free
meanwhile are forgotten before their tag wakes.
"""

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.algorithm cimport sort
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_assign, try_make_room, try_push_back, try_reserve
from bfc._core cimport (
    FREE, LARGE, LEAVING, MAPPED_ELSEWHERE, NO_CHUNK, NO_LANE, NO_PAGE, NO_STREAM, UNMAPPED, ChunkHandle, Lane,
    PageBitmap, PlanServer,
)
from bfc.drivers.cuda._driver cimport CUresult, failure
from bfc.drivers.cuda._device cimport bfc_native_source
from bfc.allocators._changes cimport (
    begin_mapping, bytes_behind, cancel_mapping, cut_absent, forget_absent, join_absent, remove_range,
)
from bfc.allocators._pages cimport KEPT, LIVE, NO_SLOT, NO_VIEW, RETIRED, PageRecord, Pages, Run, Slot, StitchedView
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._reading cimport fault_in_pages
from bfc.allocators.mapping._address_ranges cimport (
    RESERVE, AddressRange, AddressRanges, Calls, Faults, MappedRun, Page, PageRef, Place, PyThreadState, Retired,
    RetiredRef, TagTransition, belongs_to, is_of_tag, is_set_asleep, list_ranges, new_retired,
)
from bfc.allocators.mapping._sleep cimport give_page_up, take_over_transitions

from bfc.errors import SettingsError, SubAllocatorError, out_of_host_memory
from bfc.units import format_bytes

cdef extern from "source.h":
    int BFC_NOT_REACHED
cdef extern from "page_bitmap.hpp":
    pass
cdef extern from "starts.hpp":
    pass
cdef extern from "plan_server.hpp":
    pass

cdef enum:
    ANY_LENGTH = 0xFFFFFFFF             # of a run


cdef uint64_t stream_to_ask(const Lane* lane) noexcept nogil:
    """The stream to ask whether work in a lane is done. A handle that names another stream in each thread cannot be
    asked from other threads; then it is stream 0, which runs after all of these streams."""
    return 0 if lane.thread else lane.stream


cdef int add_pages(TagTransition transition, MappedRun run, set seen) except -1:
    """Adds a run to a transition, and those of its pages that are new to it."""
    cdef size_t i
    transition.runs.append(run)
    for i in range(run.pages.size()):
        if <size_t>run.pages[i].get() not in seen:
            seen.add(<size_t>run.pages[i].get())
            transition.pages.push_back(run.pages[i])
    return 0


# -- which page is in which slot --------------------------------------------------------------------------------------

cdef uint32_t page_in(Stitching stitching, AddressRange* addresses, uint64_t ptr) noexcept nogil:
    """The page in a slot, or NO_PAGE. It needs no lock: only the mapper changes the table, and opens and closes it.
    """
    return addresses.bitmap.page_at((ptr - addresses.ptr) // stitching.page_size)


cdef cbool pages_of(Stitching stitching, vector[uint32_t]& numbers, vector[PageRef]& found) noexcept nogil:
    """The pages of these numbers. False: the host has no memory for that."""
    cdef size_t i
    if not try_reserve(found, numbers.size()):
        return False
    for i in range(numbers.size()):
        found.push_back(stitching.made[numbers[i]])
    return True


cdef void drop_page(Stitching stitching, uint32_t number, Faults faults) noexcept nogil:
    """Releases a page that has been unmapped. Of a tag that sleeps it went before; if it is still mapped, it is
    released when its tag wakes."""
    cdef PageRef page = stitching.made[number]   # in `leaving` during the call, for a child that is forked there
    stitching.made[number].reset()
    # From here on the number may be given to another page.
    acquire_lock(stitching.lock[0])
    stitching.pages.forget_page(number)
    stitching.lock.release()
    if stitching.device.without_calls and (not page.get().is_made or page.get().is_mapped):
        return
    stitching.device.counts.releases += 1
    stitching.device.is_refused = False
    stitching.release_page(page, faults)


cdef cbool unmap_further_slots(Stitching stitching, uint32_t bin_set, uint32_t page, Faults faults) noexcept nogil:
    """Unmaps a page from the slots of other ranges. False: it is still mapped in some."""
    cdef uint32_t k = 0, count = 1
    cdef Slot slot
    while k < count:
        acquire_lock(stitching.lock[0])
        count = <uint32_t>stitching.pages.records[page].slots.size()
        if k < count:
            slot = stitching.pages.records[page].slots[k]
        stitching.lock.release()     # the page is LEAVING, so nobody moves it between two of its slots
        if k < count and (slot.set == bin_set or not stitching.unmap_slot(page, slot, faults)):
            k += 1
    return count == 1


cdef uint64_t page_ptr(Stitching stitching, uint32_t bin_set, uint64_t slot) noexcept nogil:
    # A lane that another thread opens moves the sets of bins.
    acquire_lock(stitching.lock[0])
    cdef uint64_t ptr = stitching.pool.bin_sets[bin_set].bitmap.address_of(slot)
    stitching.lock.release()
    return ptr


# -- a request --------------------------------------------------------------------------------------------------------

cdef int try_again_with_gil(Stitching stitching) noexcept with gil:
    """Unmaps and releases what the sub-allocator failed to take back before."""
    cdef Faults faults
    cdef AddressRange* addresses
    cdef dict idle
    cdef size_t i
    try:
        faults, idle = Faults(), {}
    except MemoryError as error:
        return stitching.device.fail(error)
    stitching.try_unreleased_again(faults)
    unreserve_again(stitching, faults)
    stitching.sweep(faults, False, True)
    for i in range(stitching.ranges.size()):
        addresses = stitching.ranges.at(i)
        if not addresses.is_known or not addresses.some_stuck or is_set_asleep(stitching, addresses.bin_set):
            continue
        if stitching.is_idle(addresses.asked_of, False, idle, faults):
            stitching.unmap_again(addresses, False, faults)
    return 0 if faults.interrupt is None else stitching.device.fail(faults.interrupt)


cdef void unreserve_again(Stitching stitching, Faults faults) noexcept:
    """Tries again to give back the addresses of ranges that the pool could not take in."""
    cdef AddressRange* addresses
    cdef size_t i = stitching.ranges.size()
    while i > 0:
        i -= 1
        addresses = stitching.ranges.at(i)
        if not addresses.is_known:
            stitching.unreserve(addresses, faults)


cdef int provide_small(Stitching stitching, AddressRange* addresses) noexcept nogil:
    """One page: a free one of the stream's large chunks, a new one, or one of another stream."""
    cdef int64_t got = move_pages_to(stitching, addresses, 1, False)
    if got == 0 and stitching.room():
        got = stitching.grow(addresses, 1, NO_CHUNK)
    if got == 0:
        got = move_pages_to(stitching, addresses, 1, True)
    return trim_other_tags(stitching, addresses, 1) if got == 0 else -1 if got < 0 else 1


cdef int provide_large(Stitching stitching, AddressRange* addresses, Wanted* wanted) noexcept nogil:
    cdef uint64_t pages = stitching.pages.pages_for(wanted.rounded), room = stitching.room()
    cdef uint64_t others, own, missing, first
    cdef uint64_t missing_at_end = stitching.missing_at_end(addresses, wanted.rounded)
    cdef int64_t got = 0
    acquire_lock(stitching.lock[0])
    # As `hold_for_view` takes them, so that a view can be made of all that counts here.
    own = stitching.pages.count_free(addresses.bin_set) + stitching.pages.count_free(addresses.bin_set - 1)
    own += stitching.pages.count_lendable(addresses.bin_set)
    stitching.lock.release()     # fewer may be free by the time they are held: then the request is looked at again
    missing = pages - own if own < pages else 0
    first = min(room, room_before_others(stitching, addresses))
    others = free_of_others(stitching, addresses) if missing > first else 0
    room = min(room, max(first, missing - min(missing, others)))
    # Where both ways need equally many new pages, the range grows: its chunks are split and merged, while a view
    # serves only requests of its own number of pages.
    if missing_at_end <= room and (missing_at_end <= missing
                                   or is_within_headroom(stitching, missing_at_end, wanted.rounded)):
        got = stitching.grow(addresses, missing_at_end, NO_CHUNK)
        return -1 if got < 0 else got > 0
    if missing == 0:
        return stitching.stitch(addresses, pages, wanted)
    # Before any page is made or moved: it would be in vain for a request that cannot be served.
    if missing > room + others:
        return trim_other_tags(stitching, addresses, missing - room - others)
    if room:
        got = stitching.grow(addresses, min(missing, room), NO_CHUNK)
    if got == 0:
        got = move_pages_to(stitching, addresses, missing, True)
    if got == 0:
        room = stitching.room()      # perhaps more than what may be made before others are asked
        got = stitching.grow(addresses, min(missing, room), NO_CHUNK) if room else 0
    return -1 if got < 0 else got > 0


cdef bint grow_behind(Stitching stitching, uint64_t address, uint64_t rounded) except -1:
    """Makes pages for a chunk that is to be as large as `rounded`, and maps them behind it. Whether it has them."""
    cdef ChunkHandle handle, behind = NO_CHUNK
    cdef uint32_t bin_set = 0
    cdef uint64_t missing = 0
    # Chunks are split and joined by other threads, so one look has to see all of its neighbours.
    acquire_lock(stitching.lock[0])
    handle = stitching.pool.handle_of(address)
    if handle != NO_CHUNK and stitching.pool.bin_sets[stitching.pool.chunks[handle].bin_set].asleep:
        handle = NO_CHUNK
    if handle != NO_CHUNK:
        bin_set = stitching.pool.chunks[handle].bin_set
        behind = stitching.pool.chunks[handle].next
        missing = rounded - stitching.pool.chunks[handle].size - bytes_behind(stitching.pool, handle)
        if bytes_behind(stitching.pool, handle):
            behind = stitching.pool.chunks[behind].next
    if behind != NO_CHUNK and (stitching.pool.chunks[behind].state != UNMAPPED
                               or stitching.pool.chunks[behind].size < missing):
        behind = NO_CHUNK
    stitching.lock.release()
    missing = stitching.pages.pages_for(missing)
    if behind == NO_CHUNK or missing > stitching.room():
        return False
    # `behind` stays UNMAPPED, since only the mapper changes that. What is free in between may be taken, or the
    # allocation be freed: then the new pages are free memory like any other, and `try_extend` looks again.
    cdef int64_t got = stitching.grow(range_for(stitching, bin_set), missing, behind)
    stitching.device.check(got)
    return got == <int64_t>missing


cdef uint64_t room_before_others(Stitching stitching, AddressRange* addresses) noexcept nogil:
    """How many pages may be made before free ones of other streams are taken. The areas that a plan gives its
    streams are not full at the same time: where they have as many pages as were ever live at once in the recording,
    they take idle ones of each other."""
    # Another thread may end the plan.
    acquire_lock(stitching.lock[0])
    cdef cbool shares = (stitching.pages.stream_in_plan(addresses.bin_set) != NO_STREAM
                         and stitching.pool.plans.current.streams() > 1)
    stitching.lock.release()
    return stitching.room_in_plan() if shares else ~<uint64_t>0


cdef uint64_t free_of_others(Stitching stitching, AddressRange* addresses) noexcept nogil:
    cdef AddressRange* other
    cdef uint64_t count
    cdef size_t i
    acquire_lock(stitching.lock[0])
    count = stitching.pages.count_of_others(addresses.bin_set)
    for i in range(stitching.ranges.size()):
        other = stitching.ranges.at(i)
        if has_same_tag(stitching, other, addresses):
            count += stitching.pages.count_free(other.bin_set)
    stitching.lock.release()     # fewer may be free by the time they are held, as in `provide_large`
    return count


cdef cbool has_same_tag(Stitching stitching, AddressRange* other, AddressRange* addresses) noexcept nogil:
    """Whether a range belongs to another stream and to the same tag: what sleeps shares no page with what is awake.
    Needs the lock."""
    cdef uint64_t* theirs = stitching.pool.bin_sets[other.bin_set].lane.pool
    cdef uint64_t* ours = stitching.pool.bin_sets[addresses.bin_set].lane.pool
    return (other.is_known and other.bin_set | 1 != addresses.bin_set | 1
            and theirs[0] == ours[0] and theirs[1] == ours[1])


cdef cbool has_other_tag(Stitching stitching, AddressRange* other, AddressRange* addresses) noexcept nogil:
    """Whether a range belongs to another tag, and is awake. Needs the lock."""
    return (other.is_known and other.bin_set | 1 != addresses.bin_set | 1
            and not has_same_tag(stitching, other, addresses) and not stitching.pool.bin_sets[other.bin_set].asleep)


cdef int trim_other_tags(Stitching stitching, AddressRange* addresses, uint64_t wanted) noexcept nogil:
    """Releases free pages of other tags, which cannot be lent. Returns whether any went."""
    cdef uint64_t there = 0
    cdef AddressRange* other
    cdef size_t i
    cdef int result
    acquire_lock(stitching.lock[0])
    for i in range(stitching.ranges.size()):
        other = stitching.ranges.at(i)
        if has_other_tag(stitching, other, addresses):
            there += stitching.pages.count_free(other.bin_set)
    stitching.lock.release()     # fewer may be free by the time they are held: each range is looked at again
    if there == 0:
        return 0
    stitching.device.guard.pause()
    result = trim_with_gil(stitching, addresses, wanted)
    stitching.device.guard.go_on()
    return result


cdef int trim_with_gil(Stitching stitching, AddressRange* addresses, uint64_t wanted) noexcept with gil:
    cdef uint64_t before = stitching.pages.count
    cdef Faults faults
    cdef AddressRange* other
    cdef cbool is_other
    cdef size_t i
    try:
        faults = Faults()
        stitching.device.check(stitching.retire_all())
        stitching.device.check(stitching.sweep(faults, True, False))
        for i in range(stitching.ranges.size()):
            other = stitching.ranges.at(i)
            acquire_lock(stitching.lock[0])
            is_other = has_other_tag(stitching, other, addresses)
            stitching.lock.release()     # it stays so: only the mapper puts a tag to sleep or wakes it
            if is_other and before - stitching.pages.count < wanted:
                trim_range(stitching, other, wanted - (before - stitching.pages.count), True, True, faults)
    except BaseException as error:
        return stitching.device.fail(error)
    return stitching.pages.count < before


cdef cbool is_within_headroom(Stitching stitching, uint64_t pages, uint64_t rounded) noexcept nogil:
    """Whether so many more pages are less above the most that was ever in use than the user allows."""
    cdef uint64_t peak
    if stitching.headroom == 0:
        return False
    acquire_lock(stitching.lock[0])
    peak = max(stitching.pool.counters.peak_bytes_in_use, stitching.pool.counters.bytes_in_use + rounded)
    stitching.lock.release()     # an estimate: only how many pages are made depends on it
    return <double>((stitching.pages.count + pages) * stitching.page_size) <= (1 + stitching.headroom) * <double>peak


# -- new pages --------------------------------------------------------------------------------------------------------

cdef AddressRange* range_for(Stitching stitching, uint32_t bin_set) noexcept nogil:
    cdef size_t i
    for i in range(stitching.ranges.size()):
        if stitching.ranges.at(i).bin_set == bin_set and stitching.ranges.at(i).is_known:
            return stitching.ranges.at(i)
    return NULL


cdef AddressRange* open_range(Stitching stitching, uint32_t bin_set) noexcept nogil:
    """Reserves addresses for as many pages as there can be, as each is mapped into a range once at most; and some
    more, in case that a few cannot be unmapped. NULL: that failed."""
    cdef AddressRange* addresses = stitching.ranges.open()
    if addresses == NULL:
        stitching.device.fail_for_memory()
        return NULL
    addresses.nbytes = (stitching.highest_limit // stitching.page_size * 17 // 16 + 16) * stitching.page_size
    addresses.slot = stitching.page_size
    addresses.bin_set = bin_set
    # A lane that another thread opens moves the sets of bins.
    acquire_lock(stitching.lock[0])
    addresses.stream = stitching.pool.bin_sets[bin_set].lane.stream
    addresses.asked_of = stream_to_ask(&stitching.pool.bin_sets[bin_set].lane)
    stitching.lock.release()
    if stitching.reserve(addresses) < 0:
        return NULL
    return addresses


cdef int map_all_fresh(Stitching stitching, AddressRange* addresses, int64_t missing, ChunkHandle at) noexcept nogil:
    cdef ChunkHandle handle
    cdef int64_t mapped
    while missing > 0:
        handle = stitching.begin(addresses, missing, at)
        mapped = -1 if handle == NO_CHUNK else stitching.map_fresh(addresses, handle)
        if mapped < 0:
            return -1
        missing -= mapped
    return 0


cdef int keep_no_addresses(Stitching stitching, AddressRange* addresses) noexcept with gil:
    try:
        raise SubAllocatorError(f"no addresses are left for stream {addresses.stream}, as some could not be "
                                f"unmapped: release_free_regions() tries that again")
    except BaseException as error:      # or the host has no memory for the text
        return stitching.device.fail(error)


cdef ChunkHandle first_hole(Stitching stitching, AddressRange* addresses) noexcept nogil:
    """The first unmapped chunk of a range, or NO_CHUNK. Needs the lock."""
    cdef ChunkHandle handle = stitching.pool.regions[addresses.ptr + addresses.nbytes].first
    while handle != NO_CHUNK and stitching.pool.chunks[handle].state != UNMAPPED:
        handle = stitching.pool.chunks[handle].next
    return handle


# -- pages that change hands ------------------------------------------------------------------------------------------

cdef int64_t move_pages_to(Stitching stitching, AddressRange* addresses, uint64_t wanted,
                           cbool from_others) noexcept nogil:
    """Lets a range use free pages of the stream's large chunks, or `from_others`. Returns how many."""
    cdef uint64_t got
    cdef cbool for_good
    if from_others and stitching.ask_captures() < 0:
        return -1
    got = hold_free(stitching, addresses, wanted, from_others)
    if got == 0:
        return 0
    # What is held is LEAVING until the calls are over: other threads can neither take it nor move it, and
    # `let_held_go` makes it free again, page by page, whatever fails.
    acquire_lock(stitching.lock[0])      # the first page of a range stays there: it may be taken and freed in turn
    for_good = from_others or stitching.pool.bin_sets[addresses.bin_set].bitmap.slots() == 0
    for_good = for_good and not stitching.are_planned        # a plan's places need theirs again
    stitching.lock.release()
    if stitching.give_held_to(addresses, addresses.stream, NO_CHUNK, from_others, for_good) < 0:
        return -1
    return got


cdef int ask_capture(Stitching stitching, uint64_t stream) noexcept with gil:
    try:
        return stitching.fences.is_captured(stream)
    except BaseException as error:
        return stitching.device.fail(error)


cdef uint64_t hold_free(Stitching stitching, AddressRange* addresses, uint64_t wanted,
                        cbool from_others) noexcept nogil:
    """Holds free pages one by one: of other streams, those that were here before, then those of the stream that
    has most of them."""
    cdef uint64_t got = 0, most
    cdef AddressRange* other
    cdef AddressRange* best
    cdef size_t i
    acquire_lock(stitching.lock[0])      # what is found free is held under the same lock: nobody else takes it first
    stitching.are_planned = False
    if not from_others:
        got = stitching.pages.hold(addresses.bin_set | 1, wanted, 1, stitching.held)
        if got == 0:
            got = stitching.pages.hold_from_plan(stitching.pages.stream_in_plan(addresses.bin_set), wanted, 1, True,
                                                 stitching.held)
            stitching.are_planned = got > 0
    for i in range(stitching.ranges.size()):
        other = stitching.ranges.at(i)
        if from_others and may_give(stitching, other, addresses):
            got += stitching.pages.hold_again(addresses.bin_set, other.bin_set, wanted - got, stitching.held)
    while from_others and got < wanted:
        most = 0
        best = NULL
        for i in range(stitching.ranges.size()):
            other = stitching.ranges.at(i)
            if may_give(stitching, other, addresses) and stitching.pages.count_free(other.bin_set) > most:
                most, best = stitching.pages.count_free(other.bin_set), other
        if best != NULL:
            if stitching.pages.hold_highest(best.bin_set, wanted - got, stitching.held) == 0:
                break
        elif stitching.pages.hold_from_plan(best_lender(stitching, addresses), wanted - got, 1, True,
                                            stitching.held) == 0:
            break
        got = stitching.held.size()
    stitching.lock.release()
    return got


cdef cbool may_give(Stitching stitching, AddressRange* other, AddressRange* addresses) noexcept nogil:
    """Whether a range may take the free pages of another stream's. Needs the lock."""
    return has_same_tag(stitching, other, addresses) and not other.is_captured


cdef uint32_t best_lender(Stitching stitching, AddressRange* addresses) noexcept nogil:
    """The plan's stream that has most idle pages for another one, or NO_STREAM. Needs the lock."""
    cdef PlanServer* plan = stitching.pages.plan_for(addresses.bin_set)
    cdef uint32_t own = stitching.pages.stream_in_plan(addresses.bin_set), best = NO_STREAM, stream
    cdef uint64_t most = 0, count
    cdef size_t i
    if plan == NULL:
        return NO_STREAM
    for stream in range(<uint32_t>plan.streams()):
        if stream == own or not plan.is_bound(stream):
            continue
        for i in range(stitching.orderable.size()):
            if stitching.orderable[i] == plan.handle_of(stream):
                count = plan.count_lendable(stream)
                if count > most:
                    most, best = count, stream
    return best


cdef int order_after(Stitching stitching, uint64_t stream) noexcept nogil:
    """Makes a stream wait for what the streams of the held pages have queued."""
    cdef AddressRange* other
    cdef uint64_t passed = 0, user
    cdef vector[uint64_t] users
    cdef size_t i, k
    cdef int result = 0
    # What is held was free before: the work that used it is queued already, and no more is added meanwhile.
    for k in range(stitching.held.size()):
        for i in range(stitching.ranges.size()):
            other = stitching.ranges.at(i)
            if other.bin_set == stitching.held[k].set:
                user = user_of(stitching, other, stitching.held[k].first)
                if user != stream:
                    passed += stitching.held[k].count * stitching.page_size
                    if not try_push_back(users, user):
                        return stitching.device.fail_for_memory()
    # One wait for each stream, however many of its pages are held.
    sort(users.begin(), users.end())
    for i in range(users.size()):
        if result == 0 and (i == 0 or users[i] != users[i - 1]):
            stitching.device.counts.stream_waits += 1
            stitching.device.guard.pause()
            result = stitching.order(users[i], stream)
            stitching.device.guard.go_on()
    if result < 0:
        return -1
    acquire_lock(stitching.lock[0])      # another thread may have ended the plan
    if stitching.pool.plans.current != NULL:
        stitching.pool.plans.current.passed += passed
    stitching.lock.release()
    return 0


cdef uint64_t user_of(Stitching stitching, AddressRange* addresses, uint32_t slot) noexcept nogil:
    """The stream that has used a page in a slot."""
    cdef uint64_t user = addresses.asked_of
    cdef uint32_t stream
    acquire_lock(stitching.lock[0])
    if addresses.plan != NULL:      # it lends only pages that one stream alone uses
        stream = addresses.plan.owner_of(addresses.region, slot)
        user = addresses.plan.handle_of(stream) if stream != NO_STREAM else user
    stitching.lock.release()
    return user


cdef int map_held(Stitching stitching, AddressRange* addresses, ChunkHandle at) noexcept nogil:
    """Maps the held pages into a range, but for those that are mapped there already. They are absent there. `at`:
    into this unmapped chunk first, or (NO_CHUNK) wherever there is room."""
    cdef vector[uint32_t] pages
    cdef uint32_t page
    cdef size_t k
    if not try_reserve(pages, stitching.held.size()):
        return stitching.device.fail_for_memory()
    # What is held stays, but a lane that another thread opens moves the sets of bins.
    acquire_lock(stitching.lock[0])
    for k in range(stitching.held.size()):
        page = stitching.pool.bin_sets[stitching.held[k].set].bitmap.page_at(stitching.held[k].first)
        if stitching.pages.records[page].in_set(addresses.bin_set) == NO_SLOT:
            pages.push_back(page)
    stitching.lock.release()
    while not pages.empty():
        if map_again(stitching, addresses, pages, at) < 0:
            return -1
        at = NO_CHUNK
    return 0


cdef int map_again(Stitching stitching, AddressRange* addresses, vector[uint32_t]& pages,
                   ChunkHandle at) noexcept nogil:
    """Maps as many of these pages as one row of addresses has room for, and takes them off the list."""
    cdef ChunkHandle handle = stitching.begin(addresses, pages.size(), at)
    cdef Place place
    cdef vector[uint32_t] mapped
    if handle == NO_CHUNK:
        return -1
    acquire_lock(stitching.lock[0])
    place = Place(stitching.pool.chunks[handle].ptr, stitching.pool.chunks[handle].size)
    stitching.lock.release()     # `begin` has cut the chunk, so nobody else touches it
    stitching.device.forget_lost()
    if (list_first(stitching, pages, place.nbytes // stitching.page_size, mapped) < 0
            or put_again(stitching, addresses, handle, place, mapped) < 0):
        acquire_lock(stitching.lock[0])
        if stitching.device.has_lost():
            stitching.pool.chunks[handle].state = MAPPED_ELSEWHERE     # until it has been unmapped
        else:
            cancel_mapping(stitching.pool, handle, False)
        stitching.note_unmapped(addresses, NO_CHUNK)
        stitching.lock.release()
        if stitching.device.has_lost():
            keep_stuck(stitching, mapped, place.ptr, 0)
        stitching.device.touched.nbytes = 0
        return -1
    pages.erase(pages.begin(), pages.begin() + mapped.size())
    return 0


cdef int list_first(Stitching stitching, vector[uint32_t]& pages, size_t count, vector[uint32_t]& found) noexcept nogil:
    if not try_reserve(found, count):
        return stitching.device.fail_for_memory()
    while found.size() < count:
        found.push_back(pages[found.size()])
    return 0


cdef int put_again(Stitching stitching, AddressRange* addresses, ChunkHandle handle, Place place,
                   vector[uint32_t]& numbers) noexcept nogil:
    cdef vector[PageRef] pages
    cdef cbool done
    if not pages_of(stitching, numbers, pages):
        return stitching.device.fail_for_memory()
    if stitching.device.put(place.ptr, pages, place.nbytes) < 0:
        return -1
    acquire_lock(stitching.lock[0])
    # the pages have a further address, and are still used through the old one: nothing is free yet
    done = add_slots(stitching, addresses, handle, numbers)
    stitching.device.touched.nbytes = 0 if done else stitching.device.touched.nbytes
    stitching.lock.release()
    if not done:
        stitching.device.undo_mapping(place.ptr, place.nbytes)
        return stitching.device.fail_for_memory()
    return 0


cdef cbool add_slots(Stitching stitching, AddressRange* addresses, ChunkHandle handle,
                     vector[uint32_t]& pages) noexcept nogil:
    """Enters a further slot of each of these pages. False: the host has no memory for it. Needs the lock."""
    cdef PageBitmap* bitmap = stitching.pool.bin_sets[addresses.bin_set].bitmap
    cdef size_t slot = bitmap.slot_at(stitching.pool.chunks[handle].ptr), added = 0
    if not cut_absent(stitching.pool, handle, stitching.page_size):
        return False
    while added < pages.size():
        if not stitching.pages.records[pages[added]].try_add(Slot(addresses.bin_set, <uint32_t>(slot + added))):
            break
        added += 1
    if added < pages.size():
        while added > 0:
            added -= 1
            stitching.pages.records[pages[added]].slots.pop_back()
        join_absent(stitching.pool, handle, pages.size() * stitching.page_size)
        return False
    for added in range(pages.size()):
        bitmap.set_page(slot + added, pages[added])
        bitmap.note_chunk(slot + added, handle)
        handle = stitching.pool.chunks[handle].next
    return True


cdef int activate_held(Stitching stitching, AddressRange* addresses, cbool for_good) noexcept nogil:
    """Lets the held pages be used through their slots in a range from now on. `for_good`: views rely on it."""
    cdef Run here, there
    cdef PageRecord* record
    cdef uint32_t to
    cdef cbool done = True
    acquire_lock(stitching.lock[0])
    # each page is made free at its new address and MAPPED_ELSEWHERE at its old one under one lock: never both
    while stitching.held.size() and done:
        here = stitching.held.back()
        record = &stitching.pages.records[stitching.pool.bin_sets[here.set].bitmap.page_at(here.first)]
        to = record.in_set(addresses.bin_set)
        there = Run(addresses.bin_set, record.slots[to].number, 1)
        done = stitching.pages.free_run(&there)
        if done:
            stitching.pool.chunks[stitching.pages.chunk_of(&here)].state = MAPPED_ELSEWHERE
            record.active = to
            stitching.pages.count_moved(here.set, addresses.bin_set)
            record.primary = to if for_good else record.primary
            # One by one: if the next one fails, `let_held_go` finds only those that have not moved.
            stitching.held.pop_back()
    stitching.lock.release()
    return 0 if done else stitching.device.fail_for_memory()


# -- views ------------------------------------------------------------------------------------------------------------

cdef int hold_for_view(Stitching stitching, AddressRange* addresses, uint64_t pages, uint32_t* number) noexcept nogil:
    """Holds pages for a view, and opens it. 0: there are too few."""
    cdef uint64_t held
    cdef uint32_t set_of_views
    cdef StitchedView* view
    cdef cbool opened, is_short
    # Free pages are counted and held at once, so that nobody else takes one in between.
    acquire_lock(stitching.lock[0])
    held = stitching.pages.hold(addresses.bin_set, pages, ANY_LENGTH, stitching.held)
    if held < pages:
        held += stitching.pages.hold(addresses.bin_set - 1, pages - held, ANY_LENGTH, stitching.held)
    if held < pages:
        held += stitching.pages.hold_from_plan(stitching.pages.stream_in_plan(addresses.bin_set), pages - held,
                                               ANY_LENGTH, False, stitching.held)
    is_short = held < pages and (stitching.pages.count_free(addresses.bin_set)
                                 + stitching.pages.count_free(addresses.bin_set - 1)
                                 + stitching.pages.count_lendable(addresses.bin_set) + held < pages)
    set_of_views = stitching.pool.open_ranges(addresses.bin_set)
    number[0] = stitching.pages.views.open() if held == pages else <uint32_t>NO_VIEW
    opened = set_of_views != NO_LANE and number[0] != NO_VIEW
    if opened:
        view = &stitching.pages.views.at(number[0])
        view.pages = <uint32_t>pages
        view.set = set_of_views
        opened = try_assign(view.runs, stitching.held)
        if not opened:
            stitching.pages.views.forget(number[0])
    if not opened:
        stitching.pages.let_go(stitching.held)
    stitching.lock.release()
    return opened if opened or is_short else stitching.device.fail_for_memory()


cdef int map_view(Stitching stitching, uint32_t number, Wanted* wanted) noexcept nogil:
    cdef vector[uint32_t] numbers
    cdef vector[PageRef] pages
    cdef uint64_t ptr = 0, nbytes = stitching.pages.views.at(number).pages * stitching.page_size
    cdef RetiredRef begun = new_retired(0, 0)
    stitching.device.forget_lost()
    if (begun.get() == NULL or not list_pages(stitching, number, numbers) or not pages_of(stitching, numbers, pages)
            or not try_push_back(stitching.retired, begun)):     # for a child that is forked meanwhile
        return stitching.device.fail_for_memory()
    stitching.device.add_calls(1)
    if (stitching.device.call(RESERVE, 0, nbytes, &ptr) < 0 or put_view(stitching, number, begun.get(), ptr, nbytes,
                                                                        pages, wanted) < 0):
        stitching.retired.pop_back()
        if stitching.device.has_lost():
            keep_stuck(stitching, numbers, ptr, nbytes)
        elif ptr:
            give_addresses_up(stitching, ptr, nbytes, None)
        stitching.device.touched.nbytes = 0
        return -1
    stitching.retired.pop_back()
    return 0


cdef int put_view(Stitching stitching, uint32_t number, Retired* begun, uint64_t ptr, uint64_t nbytes,
                  vector[PageRef]& pages, Wanted* wanted) noexcept nogil:
    begun.ptr, begun.nbytes = ptr, nbytes
    if stitching.device.put(ptr, pages, nbytes) < 0:
        return -1
    if enter_view(stitching, number, ptr, wanted) < 0:
        stitching.device.undo_mapping(ptr, nbytes)
        return -1
    return 0


cdef int enter_view(Stitching stitching, uint32_t number, uint64_t ptr, Wanted* wanted) noexcept nogil:
    """Adds a view that is mapped to the pool, and hands it out: nothing is held any more."""
    cdef uint64_t nbytes = stitching.pages.views.at(number).pages * stitching.page_size
    acquire_lock(stitching.lock[0])      # the view becomes a chunk that is in use: no other request finds it free
    cdef cbool overlaps = stitching.pool.overlaps_region(ptr, nbytes)
    stitching.pages.views.at(number).address = ptr
    if not overlaps:
        wanted.handle = stitching.pages.hand_out_new(number, wanted.requested, wanted.stream, wanted.indexed)
    if wanted.handle != NO_CHUNK:
        stitching.held.clear()
        stitching.device.touched.nbytes = 0
    stitching.lock.release()
    if overlaps:
        return stitching.device.refuse_overlap(ptr)
    return stitching.device.fail_for_memory() if wanted.handle == NO_CHUNK else 0


cdef int retire_for(Stitching stitching, uint64_t pages) noexcept nogil:
    """Retires the views that were used longest ago, so that with one more there are no more views than pages."""
    cdef uint32_t oldest
    cdef int some = True
    while some > 0:
        acquire_lock(stitching.lock[0])
        oldest = NO_VIEW
        if stitching.pages.views.slots() + pages > stitching.pages.count:
            oldest = stitching.pages.oldest_kept_view()
        stitching.lock.release()     # it may be taken now: `retire` looks again
        some = stitching.retire(oldest) if oldest != NO_VIEW else 0
    return some


# -- views that go ----------------------------------------------------------------------------------------------------

cdef void keep_stuck(Stitching stitching, vector[uint32_t]& pages, uint64_t ptr, uint64_t nbytes) noexcept nogil:
    """Notes the addresses at which pages stayed mapped after a `put` that failed. Once they are unmapped, the pages
    are released, and the reservation (0 bytes: there is none) is given back. Where the host has no memory for
    that, it is not known any more where they are, and the pages are kept for good."""
    cdef RetiredRef stuck = new_retired(ptr, nbytes)
    cdef PageRecord* record
    cdef size_t i
    if stuck.get() != NULL and try_assign(stuck.get().pages, pages) and (
            try_push_back(stuck.get().mapped, stitching.device.lost_row) if stitching.device.lost_row.nbytes else
            try_assign(stuck.get().mapped, stitching.device.lost)):
        stuck.get().is_stuck = True
        try_push_back(stitching.retired, stuck)
    acquire_lock(stitching.lock[0])      # the pages are held still: nobody could release one before it is counted
    # They count as pages of a view, since what is in a view is not released.
    for i in range(pages.size()):
        record = &stitching.pages.records[pages[i]]
        record.views += 1
    stitching.lock.release()


cdef void keep_addresses(Stitching stitching, uint64_t ptr, uint64_t nbytes) noexcept nogil:
    """Notes a reservation that is to be given back."""
    cdef RetiredRef stuck = new_retired(ptr, nbytes)
    if stuck.get() != NULL:
        stuck.get().is_stuck = True
        try_push_back(stitching.retired, stuck)


cdef void give_addresses_up(Stitching stitching, uint64_t ptr, uint64_t nbytes, Faults faults) noexcept nogil:
    """Gives a reservation back. If that fails, it is tried again the next time that memory is given back."""
    if stitching.device.unreserve(ptr, nbytes) < 0:
        keep_addresses(stitching, ptr, nbytes)
        stitching.device.drop_error(faults, False)


cdef int mark_stream(Stitching stitching, Retired* retired) noexcept nogil:
    """Marks what its stream has queued. 0: the device has failed."""
    cdef bfc_native_source* source = stitching.fences.native
    cdef PyThreadState* state
    cdef int result
    if source == NULL:
        return make_fence(stitching, retired)
    state = stitching.device.guard.let_go()
    result = source.mark(source.self, retired.stream, &retired.event)
    stitching.device.guard.take_back(state)
    return result == 0


cdef int make_fence(Stitching stitching, Retired* retired) noexcept with gil:
    try:
        fence = (stitching.source.sub_allocator.fence(retired.stream) if stitching.source.sub_allocator.asynchronous
                 else None)
    except Exception:
        return 0
    except BaseException as error:
        return stitching.device.fail(error)
    if fence is not None:
        Py_INCREF(fence)
        retired.fence = <PyObject*>fence
    return 1


cdef int has_finished(Stitching stitching, Retired* retired, cbool wait) noexcept nogil:
    """Whether the stream of a view has finished with it; `wait`: waits until it has. -1: the device has failed."""
    cdef bfc_native_source* source = stitching.fences.native
    cdef PyThreadState* state
    cdef int result
    if retired.fence != NULL:
        return ask_fence(stitching, retired, wait)
    if retired.event == NULL:
        return 1
    state = stitching.device.guard.let_go()
    result = source.reached(source.self, &retired.event, wait)
    if result == 0:
        source.drop(source.self, retired.event)
        retired.event = NULL
    stitching.device.guard.take_back(state)
    if result == BFC_NOT_REACHED:
        return 0
    if result == 0:
        return 1
    stitching.device.guard.pause()
    keep_event_error(stitching, result, wait)
    stitching.device.guard.go_on()
    return -1


cdef int keep_event_error(Stitching stitching, int result, cbool wait) noexcept with gil:
    try:
        raise failure(<CUresult>result, "cuEventSynchronize" if wait else "cuEventQuery")
    except BaseException as error:      # or the host has no memory for the text
        return stitching.device.fail(error)


cdef int ask_fence(Stitching stitching, Retired* retired, cbool wait) noexcept with gil:
    try:
        fence = <object>retired.fence
        if wait:
            fence.wait()
        return bool(fence.done())
    except BaseException as error:
        return stitching.device.fail(error)


cdef void drop_fence(Stitching stitching, Retired* retired) noexcept nogil:
    if retired.event != NULL:
        stitching.fences.native.drop(stitching.fences.native.self, retired.event)
        retired.event = NULL
    if retired.fence != NULL:
        with gil:
            Py_XDECREF(retired.fence)
        retired.fence = NULL


cdef void drop_fences(Stitching stitching) noexcept:
    cdef size_t i
    for i in range(stitching.retired.size()):
        drop_fence(stitching, stitching.retired[i].get())


cdef cbool list_pages(Stitching stitching, uint32_t number, vector[uint32_t]& pages) noexcept nogil:
    """Adds the numbers of a view's pages. False: the host has no memory for that. Only the thread that maps changes
    what is read here."""
    cdef StitchedView* view = &stitching.pages.views.at(number)
    cdef Run* run
    cdef size_t i, k
    if not try_reserve(pages, view.pages):
        return False
    # A lane that another thread opens moves the sets of bins.
    acquire_lock(stitching.lock[0])
    for k in range(view.runs.size()):
        run = &view.runs[k]
        for i in range(run.count):
            pages.push_back(stitching.pool.bin_sets[run.set].bitmap.page_at(run.first + i))
    stitching.lock.release()
    return True


cdef int unmap_retired(Stitching stitching, Retired* retired) noexcept nogil:
    cdef PageRecord* record
    cdef size_t i
    # The view is in the pool no more, so nobody takes it. Its pages may be in use at their other addresses
    # meanwhile; `views` keeps them from being released until the view is unmapped.
    while retired.mapped.size():
        if stitching.device.unmap(retired.mapped[0].ptr, retired.mapped[0].nbytes) < 0:
            return -1
        retired.mapped.erase(retired.mapped.begin())
        stitching.device.touched.nbytes = 0
    acquire_lock(stitching.lock[0])      # from here on the pages may be released
    for i in range(retired.pages.size()):
        record = &stitching.pages.records[retired.pages[i]]
        record.views -= 1
    retired.pages.clear()
    stitching.lock.release()
    if retired.nbytes:
        return stitching.device.unreserve(retired.ptr, retired.nbytes)
    free_addresses(stitching, retired.ptr)
    return 0


cdef void free_addresses(Stitching stitching, uint64_t ptr) noexcept nogil:
    """Lets the addresses of a range be used again at which `map_again` failed."""
    cdef AddressRange* addresses
    cdef ChunkHandle handle
    cdef size_t i
    for i in range(stitching.ranges.size()):
        addresses = stitching.ranges.at(i)
        if not addresses.is_known or not addresses.ptr <= ptr < addresses.ptr + addresses.nbytes:
            continue
        # A free of a neighbour reads the state of this chunk, and may join the two.
        acquire_lock(stitching.lock[0])
        handle = stitching.chunk_around(addresses, ptr)
        if stitching.pool.chunks[handle].state == MAPPED_ELSEWHERE and not stitching.has_page(addresses, ptr):
            forget_absent(stitching.pool, handle)
        stitching.note_unmapped(addresses, NO_CHUNK)
        stitching.lock.release()


# -- giving back ------------------------------------------------------------------------------------------------------

cdef bint is_idle_now(Stitching stitching, uint64_t stream, bint wait) except -1:
    """Whether a stream has finished with what was queued until now. Of one that captures a graph, nobody knows."""
    if stitching.fences.is_captured(stream):
        return False
    if wait:
        stitching.source.sub_allocator.wait(stream)
        return True
    fence = stitching.source.sub_allocator.fence(stream) if stitching.source.sub_allocator.asynchronous else None
    return fence is None or fence.done()


cdef int trim_range(Stitching stitching, AddressRange* addresses, uint64_t most, bint views_too, bint wait,
                    Faults faults) except -1:
    """Releases free pages of a range, if its stream has finished with them."""
    cdef bint is_idle = False
    # Held first, and then the stream is asked: a page that another thread frees later is not among them, though
    # work that it has queued may still use that page.
    hold_to_trim(stitching, addresses, most, views_too)
    if stitching.held.empty():
        return 0
    try:
        is_idle = is_idle_now(stitching, addresses.asked_of, wait)
    except BaseException as error:
        faults.add(error)
    if is_idle:
        stitching.unmap_held(addresses, faults)
    else:
        stitching.let_held_go()
    return 0


cdef void hold_to_trim(Stitching stitching, AddressRange* addresses, uint64_t most, bint views_too) noexcept:
    # A page that no view has gets none before it is unmapped: only the mapper stitches.
    acquire_lock(stitching.lock[0])
    stitching.pages.hold_unshared(addresses.bin_set, most, views_too, stitching.held)
    stitching.lock.release()


# -- the end ----------------------------------------------------------------------------------------------------------

cdef void forget_chunks(Stitching stitching) noexcept:
    """Takes all ranges and views out of the pool."""
    cdef StitchedView* view
    cdef uint32_t number
    # All goes at once: a free in another thread finds its chunk with all its neighbours, or none.
    acquire_lock(stitching.lock[0])
    for number in range(stitching.pages.views.count()):
        view = &stitching.pages.views.at(number)
        if view.state in (KEPT, LIVE):
            remove_range(stitching.pool, view.address, view.pages * stitching.page_size)
            stitching.pages.views.retire(number)
    stitching.forget_ranges()
    stitching.lock.release()


cdef void close_views(Stitching stitching, Faults faults) noexcept:
    cdef StitchedView* view
    cdef uint32_t number
    cdef uint64_t ptr, nbytes
    stitching.sweep(faults, True, True)
    for number in range(stitching.pages.views.count()):
        view = &stitching.pages.views.at(number)     # stays where it is in the calls: only the mapper opens views
        if view.state != RETIRED:
            continue
        ptr, nbytes = view.address, view.pages * stitching.page_size
        if not is_set_asleep(stitching, view.set) and stitching.device.unmap(ptr, nbytes) < 0:
            stitching.device.drop_error(faults, False)
            continue
        # Only now that it is unmapped: a child that was forked before still finds what to unmap.
        acquire_lock(stitching.lock[0])
        stitching.pages.forget_view(number)
        stitching.device.touched.nbytes = 0
        stitching.lock.release()
        give_addresses_up(stitching, ptr, nbytes, faults)


# -- sleep ------------------------------------------------------------------------------------------------------------

cdef int retire_views_of(Stitching stitching, uint64_t tag) except -1:
    """Unmaps the views of a tag that nothing lives in."""
    cdef uint32_t number
    cdef Retired* retired
    cdef size_t i, k
    cdef cbool is_here = False
    for number in range(stitching.pages.views.count()):
        if is_kept_of(stitching, number, tag):
            stitching.device.check(stitching.retire(number))
    stitching.device.check(stitching.sweep(None, True, True))
    acquire_lock(stitching.lock[0])
    for i in range(stitching.retired.size()):
        retired = stitching.retired[i].get()
        for k in range(retired.pages.size()):
            is_here = is_here or is_of_tag(stitching, stitching.pages.records[retired.pages[k]].slots[0].set, tag)
    stitching.lock.release()     # a page changes its tag never, and its slots only by the mapper
    if is_here:
        raise SubAllocatorError(f"{stitching.source.sub_allocator!r} failed to unmap memory that is not in use; "
                                f"it is tried again by the next call")
    return 0


cdef cbool is_kept_of(Stitching stitching, uint32_t number, uint64_t tag) noexcept:
    """Whether a view is one of a tag that nothing lives in."""
    # Other threads take views that are kept, and free them.
    acquire_lock(stitching.lock[0])
    cdef cbool found = (stitching.pages.views.at(number).state == KEPT
                        and is_of_tag(stitching, stitching.pages.views.at(number).set, tag))
    stitching.lock.release()
    return found


cdef int list_runs(Stitching stitching, TagTransition transition, bint is_mapped) except -1:
    cdef vector[AddressRange*] found
    cdef AddressRange* addresses
    cdef PageBitmap* bitmap
    cdef uint64_t slot
    cdef uint32_t number
    cdef MappedRun run
    cdef set seen = set()
    list_ranges(stitching, transition.tag.number, found)
    for addresses in found:
        bitmap = addresses.bitmap       # needs no lock, as in `page_in`
        slot = 0
        while slot < bitmap.slots():
            run = MappedRun()
            run.ptr = bitmap.address_of(slot)
            run.is_mapped = is_mapped
            while slot < bitmap.slots() and bitmap.page_at(slot) != NO_PAGE:
                run.pages.push_back(stitching.made[bitmap.page_at(slot)])
                slot += 1
            run.nbytes = run.pages.size() * stitching.page_size
            if run.nbytes:
                add_pages(transition, run, seen)
            slot += 1
    # Kept ones, too: what lived there may have been freed since the views that nothing lives in were unmapped.
    for number in range(stitching.pages.views.count()):
        if stitching.pages.views.at(number).state in (KEPT, LIVE):     # others only change one into the other
            stitching.add_view(transition, number, is_mapped, seen)
    return 0


cdef void keep_left(Stitching stitching, TagTransition transition, MappedRun run) noexcept:
    """Keeps the part of a run that stayed mapped, to be unmapped later."""
    cdef MappedRun part
    cdef uint64_t first
    run.tag = transition.tag.number
    if run.is_mapped:
        stitching.left.append(run)
    elif run.lost is not None:
        for ptr, nbytes in run.lost:
            part = MappedRun()
            part.ptr = ptr
            part.nbytes = nbytes
            part.tag = transition.tag.number
            part.is_mapped = True
            first = (part.ptr - run.ptr) // stitching.page_size
            part.pages.assign(run.pages.begin() + first,
                              run.pages.begin() + first + part.nbytes // stitching.page_size)
            stitching.left.append(part)


cdef void give_up_left(Stitching stitching, Faults faults) noexcept:
    cdef MappedRun run
    cdef Page* page
    cdef size_t k
    cdef Py_ssize_t i = len(stitching.left)
    while i > 0:
        i -= 1
        run = stitching.left[i]
        if run.is_mapped and stitching.device.unmap(run.ptr, run.nbytes) < 0:
            stitching.device.drop_error(faults, False)
        elif run.is_mapped:
            run.note_unmapped()
            stitching.device.touched.nbytes = 0
    for run in stitching.left:
        for k in range(run.pages.size()):
            page = run.pages[k].get()
            page.is_mapped = page.is_mapped or run.is_mapped
    i = len(stitching.left)
    while i > 0:
        i -= 1
        run = stitching.left[i]
        for k in range(run.pages.size() if not run.is_mapped else 0):
            page = run.pages[k].get()
            if page.is_made and not page.is_mapped:
                give_page_up(stitching, page)
        if not run.is_mapped:
            del stitching.left[i]
    stitching.left_count = len(stitching.left)


cdef void forget_views_of(Stitching stitching, uint64_t tag) noexcept:
    """Forgets the views of a sleeping tag that nothing lives in any more, and gives their addresses back."""
    cdef uint32_t number
    cdef size_t i
    cdef uint64_t ptr, nbytes
    cdef vector[uint32_t] pages
    for number in range(stitching.pages.views.count()):
        pages.clear()       # nobody takes the view between these locks, as its tag is blocked
        if not is_kept_of(stitching, number, tag) or not list_pages(stitching, number, pages):
            continue
        ptr = stitching.pages.views.at(number).address
        nbytes = stitching.pages.views.at(number).pages * stitching.page_size
        # Its record is all that changes here: a snapshot in another thread may read it.
        acquire_lock(stitching.lock[0])
        stitching.pages.retire_view(number)
        stitching.lock.release()
        for i in range(pages.size()):       # only the mapper reads and changes how many views a page has
            stitching.pages.records[pages[i]].views -= 1
        give_addresses_up(stitching, ptr, nbytes, None)   # if that fails, the next sweep tries again


cdef void shrink_range(Stitching stitching, AddressRange* addresses, Faults faults) noexcept:
    try:
        if addresses.some_stuck:
            stitching.unmap_again(addresses, False, faults)
        hold_to_trim(stitching, addresses, stitching.pages.count, True)
        stitching.unmap_held(addresses, faults)      # no stream is asked: their memory went when the tag fell asleep
    except BaseException:
        pass    # the host is out of memory: then these pages wake with the rest


# -- a thread that is there no more -----------------------------------------------------------------------------------

cdef void forget_retired(Stitching stitching, Place touched, Place gone) noexcept:
    """Enters in the records what `end_calls_of_other` has unmapped and unreserved of views."""
    cdef Retired* retired
    cdef StitchedView* view
    cdef uint32_t number
    cdef size_t i = stitching.retired.size(), k
    while i > 0:
        i -= 1
        retired = stitching.retired[i].get()
        k = retired.mapped.size()
        while k > 0:
            k -= 1
            if touched.has(retired.mapped[k].ptr):
                retired.mapped.erase(retired.mapped.begin() + k)
        if gone.nbytes and retired.nbytes and retired.ptr == gone.ptr:
            drop_fence(stitching, retired)
            stitching.retired.erase(stitching.retired.begin() + i)
    for number in range(stitching.pages.views.count()):
        view = &stitching.pages.views.at(number)
        if view.state == RETIRED and touched.nbytes and view.address == touched.ptr:
            # The pool's records are changed under the lock, also where no other thread is left.
            acquire_lock(stitching.lock[0])
            stitching.pages.forget_view(number)
            stitching.lock.release()
            keep_addresses(stitching, touched.ptr, touched.nbytes)  # its addresses are left


@cython.final
@cython.no_gc_clear
cdef class Stitching(AddressRanges):
    """What is done for a request that no free chunk fits. It never calls the allocator."""

    def __cinit__(self):
        self.pages = Pages()
        self.left = []

    def __dealloc__(self):
        # NULL where the host had no memory for what AddressRanges holds: then nothing of this class was made
        if <void*>self.pages != NULL and self.pages is not None:
            self.pages.leave()
        drop_fences(self)

    cdef int set_up(self, uint64_t limit, uint64_t page_size, double headroom) except -1:
        self.limit = self.highest_limit = limit
        self.is_on = True
        self.page_size = page_size
        self.headroom = headroom
        self.pages.watch(self.pool, page_size)
        return 0

    cdef int page_shift(self) noexcept:
        """The exponent of two that the page size is."""
        cdef int shift = 0
        while <uint64_t>1 << shift < self.page_size:
            shift += 1
        return shift

    cdef uint64_t count_calls(self) noexcept nogil:
        """The calls made so far, without waits."""
        cdef Calls* calls = &self.device.counts
        return calls.creates + calls.maps + calls.set_accesses + calls.unmaps + calls.releases

    cdef void note_request(self, uint64_t calls_before) noexcept nogil:
        self.device.counts.most = max(self.device.counts.most, self.count_calls() - calls_before)

    # -- which page is in which slot ----------------------------------------------------------------------------------

    cdef cbool open_table(self, AddressRange* addresses) noexcept nogil:
        cdef cbool opened = self.pages.open_bitmap(addresses.bin_set, addresses.ptr)
        addresses.bitmap = self.pool.bin_sets[addresses.bin_set].bitmap
        if opened and addresses.plan != NULL:       # whose places know no order: there is room for all of it at once
            opened = addresses.bitmap.make_room(addresses.ptr + addresses.nbytes)
            if not opened:
                self.pages.close_bitmap(addresses.bin_set)
                addresses.bitmap = NULL
        return opened

    cdef void close_table(self, AddressRange* addresses) noexcept nogil:
        self.pages.close_bitmap(addresses.bin_set)
        addresses.bitmap = NULL

    cdef uint64_t slots_of(self, AddressRange* addresses) noexcept nogil:
        return addresses.bitmap.slots()

    cdef cbool has_page(self, AddressRange* addresses, uint64_t ptr) noexcept nogil:
        return page_in(self, addresses, ptr) != NO_PAGE

    cdef cbool may_be_unmapped(self, AddressRange* addresses, uint64_t ptr) noexcept nogil:
        """Pages that views still have must stay."""
        cdef uint32_t page = page_in(self, addresses, ptr)
        return page != NO_PAGE and self.pages.records[page].views == 0

    cdef void note_unmapped(self, AddressRange* addresses, ChunkHandle added) noexcept nogil:
        cdef ChunkHandle last = self.pool.chunk_at_end(&self.pool.regions[addresses.ptr + addresses.nbytes])
        addresses.tail = last if self.pool.chunks[last].state == UNMAPPED else <ChunkHandle>NO_CHUNK

    cdef uint64_t page_bytes_at(self, uint64_t ptr) noexcept:
        return self.page_size

    cdef int enter_pages(self, AddressRange* addresses, uint64_t ptr, vector[PageRef]& pages) noexcept nogil:
        cdef PageBitmap* bitmap
        cdef uint32_t number = NO_PAGE
        cdef uint64_t first
        cdef size_t entered = 0, count = pages.size(), known = max(self.made.size(), self.pages.count + count)
        cdef cbool done
        if not try_make_room(self.made, known):
            return self.device.fail_for_memory()
        self.made.resize(known)
        # All of them are entered, or none: a snapshot of another thread counts what it finds.
        acquire_lock(self.lock[0])
        bitmap = self.pool.bin_sets[addresses.bin_set].bitmap
        first = bitmap.slot_at(ptr)
        while entered < count:
            number = self.pages.enter_page(addresses.bin_set, <uint32_t>(first + entered))
            if number == NO_PAGE:
                break
            self.made[number] = pages[entered]
            entered += 1
        done = entered == count
        while entered > 0 and not done:
            entered -= 1
            number = bitmap.page_at(first + entered)
            self.pages.forget_page(number)
            self.made[number].reset()
        self.lock.release()
        return 0 if done else self.device.fail_for_memory()

    cdef void drop_slot(self, AddressRange* addresses, uint64_t ptr, Faults faults) noexcept nogil:
        cdef uint64_t slot = (ptr - addresses.ptr) // self.page_size
        cdef uint32_t page = page_in(self, addresses, ptr)
        cdef cbool is_mapped
        if page == NO_PAGE:
            return
        # The slot and the page's record change together, since `check` compares the two.
        acquire_lock(self.lock[0])
        self.pool.bin_sets[addresses.bin_set].bitmap.set_page(slot, NO_PAGE)
        self.pages.records[page].drop(self.pages.records[page].in_set(addresses.bin_set))
        is_mapped = self.pages.records[page].is_mapped()
        self.lock.release()
        if not is_mapped:       # in no slot and no view: nobody else finds it
            drop_page(self, page, faults)

    cdef cbool unmap_elsewhere(self, AddressRange* addresses, uint64_t ptr, uint64_t nbytes,
                               Faults faults) noexcept nogil:
        cdef uint64_t at = ptr
        cdef cbool only_here = True
        while at < ptr + nbytes:
            only_here = unmap_further_slots(self, addresses.bin_set, page_in(self, addresses, at), faults) and only_here
            at += self.page_size
        if not only_here and faults is not None:
            with gil:
                faults.add(SubAllocatorError(f"pages at {ptr:#x} are mapped elsewhere, too"))
        return only_here

    cdef cbool unmap_slot(self, uint32_t page, Slot slot, Faults faults) noexcept nogil:
        """Takes one of its further slots from a page. False: that failed."""
        cdef Run run = Run(slot.set, slot.number, 1)
        cdef AddressRange* addresses
        cdef size_t i
        if self.device.unmap(page_ptr(self, slot.set, slot.number), self.page_size) < 0:
            self.device.drop_error(faults, False)
            return False
        # The slot is MAPPED_ELSEWHERE until here, so no thread used it in the call.
        acquire_lock(self.lock[0])
        self.pages.records[page].drop(self.pages.records[page].in_set(slot.set))
        self.pool.bin_sets[slot.set].bitmap.set_page(slot.number, NO_PAGE)
        forget_absent(self.pool, self.pages.chunk_of(&run))
        self.device.touched.nbytes = 0
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if addresses.bin_set == slot.set and addresses.is_known:
                self.note_unmapped(addresses, NO_CHUNK)
        self.lock.release()
        return True

    cdef size_t count_beside_ranges(self) noexcept nogil:
        return self.retired.size() + self.left_count

    # -- a request ----------------------------------------------------------------------------------------------------

    cdef int provide(self, uint32_t bin_set, Wanted* wanted) noexcept nogil:
        """Brings memory for a request nearer, by one step, and may serve it. 0: there is no step that would."""
        cdef AddressRange* addresses = range_for(self, bin_set)
        # Views that were retired stay mapped until their stream has passed them: each miss looks, and waits for none.
        if self.sweep(None, False, False) < 0 or (self.has_failed() and self.try_again() < 0):
            return -1
        if addresses == NULL:
            addresses = open_range(self, bin_set)
        if addresses == NULL:
            return -1
        if addresses.bin_set & 1 == LARGE:
            return provide_large(self, addresses, wanted)
        return provide_small(self, addresses)

    cdef cbool has_failed(self) noexcept nogil:
        """Whether the sub-allocator failed to unmap or to release something that is to be tried again."""
        cdef AddressRange* addresses
        cdef size_t i
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if not addresses.is_known or (addresses.some_stuck and not is_set_asleep(self, addresses.bin_set)):
                return True
        for i in range(self.retired.size()):
            if self.retired[i].get().is_stuck:
                return True
        return self.unreleased.get() != NULL

    cdef int try_again(self) noexcept nogil:
        cdef int result
        self.device.guard.pause()
        result = try_again_with_gil(self)
        self.device.guard.go_on()
        return result

    cdef bint extend(self, uint64_t address, uint64_t rounded) except -1:
        cdef uint64_t calls
        if not self.enter(0):
            return False
        calls = self.count_calls()
        try:
            return grow_behind(self, address, rounded)
        finally:
            self.note_request(calls)
            self.leave()

    cdef uint64_t missing_at_end(self, AddressRange* addresses, uint64_t rounded) noexcept nogil:
        """The pages that a chunk for the request would need at the end of a range, beside what is free there. Another
        thread may take that after the lock. Then the new pages are free memory, and the request is looked at again."""
        cdef uint64_t size = 0, missing
        cdef ChunkHandle last
        acquire_lock(self.lock[0])
        if addresses.tail == NO_CHUNK:
            missing = ~<uint64_t>0
        else:
            last = self.pool.chunks[addresses.tail].prev
            if last != NO_CHUNK and self.pool.chunks[last].state == FREE:
                size = self.pool.chunks[last].size
            missing = self.pages.pages_for(rounded - size) if rounded > size else 1
            if missing * self.page_size > self.pool.chunks[addresses.tail].size:
                missing = ~<uint64_t>0
        self.lock.release()
        return missing

    cdef uint64_t room(self) noexcept nogil:
        """How many pages may still be made; `grow` looks again, since other threads take regions."""
        acquire_lock(self.lock[0])
        cdef uint64_t taken = self.source.taken()
        self.lock.release()     # other threads may take regions meanwhile: `grow` looks again
        return 0 if self.device.is_refused or taken >= self.limit else (self.limit - taken) // self.page_size

    cdef uint64_t room_in_plan(self) noexcept nogil:
        """How many pages fewer than it needs the plan in use has, with those that its streams have beside it."""
        cdef uint64_t most = 0, there = 0
        # The plan may have ended since it was looked at before, so it is looked for again.
        acquire_lock(self.lock[0])
        if self.pool.plans.current != NULL:
            most, there = self.pages.most_shared(), self.pages.count_shared()
        self.lock.release()
        return most - there if there < most else 0

    # -- new pages ----------------------------------------------------------------------------------------------------

    cdef int64_t grow(self, AddressRange* addresses, uint64_t wanted, ChunkHandle at) noexcept nogil:
        """Makes pages and maps them into a range: at this unmapped chunk, or else (NO_CHUNK) at its end if they fit
        there. Returns how many: fewer where the sub-allocator has no memory for more."""
        cdef uint64_t set_aside, taken
        cdef int64_t made
        acquire_lock(self.lock[0])
        taken = self.source.taken()     # other threads may have taken regions since `room` was asked
        wanted = min(wanted, (self.limit - taken) // self.page_size if taken < self.limit else <uint64_t>0)
        set_aside = wanted * self.page_size
        self.source.set_aside += set_aside
        self.source.newest_call().nbytes += set_aside   # which a fork in one of these calls must not forget
        self.lock.release()
        made = self.create(wanted, self.page_size)
        if made > 0 and map_all_fresh(self, addresses, made, at) < 0:
            made = -1
        # While their bytes are still set aside: pages that could not be mapped take memory until they are released.
        self.release_fresh()
        # From here on other threads may ask for what could not be made.
        acquire_lock(self.lock[0])
        self.source.set_aside -= set_aside
        self.source.newest_call().nbytes -= set_aside
        self.lock.release()
        return made

    cdef ChunkHandle begin(self, AddressRange* addresses, uint64_t wanted, ChunkHandle at) noexcept nogil:
        """Takes unmapped addresses, as a chunk of their own: at the end of a range, or else where it has a hole, and
        then perhaps fewer. There are some, since each page is mapped into a range once at most. NO_CHUNK: that failed.
        """
        cdef ChunkHandle handle
        cdef uint64_t nbytes = 0
        cdef cbool begun = False
        # To cut the chunk takes a record, as each split of another thread does.
        acquire_lock(self.lock[0])
        handle = at if at != NO_CHUNK else addresses.tail
        if handle == NO_CHUNK or self.pool.chunks[handle].size < wanted * self.page_size:
            handle = first_hole(self, addresses)
        if handle != NO_CHUNK:
            nbytes = min(wanted * self.page_size, self.pool.chunks[handle].size)
            begun = self.pool.bin_sets[addresses.bin_set].bitmap.make_room(self.pool.chunks[handle].ptr + nbytes)
            begun = begun and begin_mapping(self.pool, handle, nbytes)
            if begun and handle == addresses.tail:
                addresses.tail = self.pool.chunks[handle].next
        self.lock.release()
        if begun:
            return handle
        if handle != NO_CHUNK:
            self.device.fail_for_memory()
        else:
            self.device.guard.pause()
            keep_no_addresses(self, addresses)
            self.device.guard.go_on()
        return NO_CHUNK

    # -- pages that change hands --------------------------------------------------------------------------------------

    cdef int ask_captures(self) noexcept nogil:
        """Asks which streams are captured: nobody may wait for one of them, so their pages stay."""
        cdef vector[uint64_t] handles
        cdef uint64_t handle
        cdef AddressRange* other
        cdef uint32_t stream
        cdef size_t i
        cdef int captured
        for i in range(self.ranges.size()):
            other = self.ranges.at(i)
            captured = self.is_captured(other.asked_of)
            if captured < 0:
                return -1
            other.is_captured = captured
        self.orderable.clear()
        acquire_lock(self.lock[0])      # another thread may end the plan
        if self.pool.plans.current != NULL:
            for stream in range(<uint32_t>self.pool.plans.current.streams()):
                if self.pool.plans.current.is_bound(stream):
                    try_push_back(handles, self.pool.plans.current.handle_of(stream))
        self.lock.release()
        for i in range(handles.size()):
            handle = handles[i]
            captured = self.is_captured(handle)
            if captured < 0 or (not captured and not try_push_back(self.orderable, handle)):
                return -1 if captured < 0 else self.device.fail_for_memory()
        return 0

    cdef int is_captured(self, uint64_t stream) noexcept nogil:
        """Whether a stream captures a graph, and can be neither waited for nor marked."""
        cdef int captured
        if self.fences.strict or not self.fences.capture_is_marked():
            return 0
        self.device.guard.pause()
        captured = ask_capture(self, stream)
        self.device.guard.go_on()
        return captured

    cdef int give_held_to(self, AddressRange* addresses, uint64_t stream, ChunkHandle at, cbool from_others,
                          cbool for_good) noexcept nogil:
        """Lets a stream use what is held, in a range: at a chunk of it or (NO_CHUNK) wherever there is room."""
        # The stream waits first, and the pages become free last: from then on any thread may allocate them for it.
        if ((from_others and order_after(self, stream) < 0) or map_held(self, addresses, at) < 0
                or activate_held(self, addresses, for_good) < 0):
            self.let_held_go()
            return -1
        self.note_change()
        return 0

    cdef int order(self, uint64_t first, uint64_t then) noexcept with gil:
        try:
            self.source.sub_allocator.order(first, then)
        except BaseException as error:
            return self.device.fail(error)
        return 0

    cdef void let_held_go(self) noexcept nogil:
        # From here on whoever needs memory may take these pages.
        acquire_lock(self.lock[0])
        self.pages.let_go(self.held)
        self.lock.release()

    # -- views --------------------------------------------------------------------------------------------------------

    cdef int stitch(self, AddressRange* addresses, uint64_t pages, Wanted* wanted) noexcept nogil:
        """Maps free pages of a stream end to end, as a view that is kept, and serves the request there. 1, too, if
        another thread has taken some of them meanwhile."""
        cdef uint32_t number = NO_VIEW
        cdef int result = retire_for(self, pages)
        if result == 0:
            result = hold_for_view(self, addresses, pages, &number)
        if result <= 0:
            return -1 if result < 0 else 1
        # the view is in no list of the pool, and its pages are held, until `enter_view` hands it out
        if map_view(self, number, wanted) < 0:
            # The view goes before its pages can be taken: a snapshot looks at both.
            acquire_lock(self.lock[0])
            self.pages.views.forget(number)
            self.lock.release()
            self.let_held_go()
            return -1
        self.device.counts.stitches += 1
        self.note_change()
        return 1

    # -- views that go ------------------------------------------------------------------------------------------------

    cdef int retire(self, uint32_t number) noexcept nogil:
        """Takes a kept view out of use, to be unmapped once its stream has finished with it. 0: its stream is captured,
        or cannot be asked, and the view stays; or another thread has taken it."""
        cdef RetiredRef made = new_retired(0, 0)
        cdef Retired* retired = made.get()
        cdef StitchedView* view
        cdef Place place
        cdef uint64_t last_used
        cdef vector[uint32_t] pages
        cdef vector[Place] mapped
        cdef int captured, marked
        cdef cbool is_kept
        if retired == NULL:
            return self.device.fail_for_memory()
        acquire_lock(self.lock[0])
        view = &self.pages.views.at(number)
        retired.stream = stream_to_ask(&self.pool.bin_sets[view.runs[0].set].lane)     # a view's own says IN_RANGES
        if self.pool.bin_sets[view.runs[0].set].is_plan:
            retired.stream = self.pool.bin_sets[view.set].lane.stream
        place = Place(view.address, view.pages * self.page_size)
        last_used = view.last_used
        is_kept = view.state == KEPT
        self.lock.release()
        captured = self.is_captured(retired.stream) if is_kept else 0
        if not is_kept or captured:
            return -1 if captured < 0 else 0
        if not list_pages(self, number, pages) or not try_push_back(mapped, place):
            return self.device.fail_for_memory()
        marked = mark_stream(self, retired)
        if marked <= 0:
            return marked
        if not try_push_back(self.retired, made):
            drop_fence(self, retired)
            return self.device.fail_for_memory()
        acquire_lock(self.lock[0])
        view = &self.pages.views.at(number)
        # Another thread may have taken the view since it was looked at, and freed it again. Then it may have queued
        # work after the fence. Otherwise the fence is behind all work of those that had the view. Its pages have not
        # changed: only the mapper opens and retires views.
        is_kept = view.state == KEPT and view.last_used == last_used
        if is_kept:         # only now, so that a fork finds it either kept or retired
            self.pages.retire_view(number)
            retired.ptr, retired.nbytes = place.ptr, place.nbytes
            retired.pages.swap(pages)
            retired.mapped.swap(mapped)
        self.lock.release()
        if not is_kept:
            drop_fence(self, retired)
            self.retired.pop_back()
        return is_kept

    # What a view that goes waits for: an event, where the source has such for callers without the GIL, or a fence.

    cdef int sweep(self, Faults faults, cbool wait, cbool again) noexcept nogil:
        """Unmaps the retired views that no queued work uses any more. `wait`: waits for that work. `again`: also tries
        what the sub-allocator failed to unmap before. Its errors go to `faults`, and what it failed on is left to the
        next try."""
        cdef RetiredRef retired
        cdef size_t i = self.retired.size()
        cdef int done
        while i > 0:        # only the mapper changes the list, so `i` is right after each wait and call
            i -= 1
            retired = self.retired[i]
            if retired.get().is_stuck and not again:
                continue
            done = has_finished(self, retired.get(), wait)
            if done > 0 and unmap_retired(self, retired.get()) < 0:
                done = -1
            if done > 0:
                drop_fence(self, retired.get())
                self.retired.erase(self.retired.begin() + i)
            elif done < 0:
                retired.get().is_stuck = True
                if self.device.drop_error(faults, True) < 0:
                    return -1
        return 0

    cdef ChunkHandle chunk_around(self, AddressRange* addresses, uint64_t ptr) noexcept nogil:
        """The chunk of a range that an address lies in. Needs the lock."""
        cdef ChunkHandle handle = self.pool.regions[addresses.ptr + addresses.nbytes].first
        while self.pool.chunks[handle].ptr + self.pool.chunks[handle].size <= ptr:
            handle = self.pool.chunks[handle].next
        return handle

    # -- giving back --------------------------------------------------------------------------------------------------

    cdef uint64_t trim(self, uint64_t keep, bint wait, Faults faults) except? 0xFFFFFFFFFFFFFFFF:
        """Releases free pages until no more than so many bytes are left: first those that have one address. Returns
        the bytes."""
        cdef uint64_t before = self.pages.count, kept = self.pages.pages_for(keep)
        cdef dict idle = {}
        cdef AddressRange* addresses
        cdef size_t i
        cdef bint views_too
        self.try_unreleased_again(faults)
        unreserve_again(self, faults)
        for views_too in (False, True):
            if views_too and self.pages.count > kept:
                self.device.check(self.retire_all())
            self.sweep(faults, wait, True)
            for i in range(self.ranges.size()):
                addresses = self.ranges.at(i)
                if not addresses.is_known or is_set_asleep(self, addresses.bin_set):
                    continue
                if addresses.some_stuck and self.is_idle(addresses.asked_of, wait, idle, faults):
                    self.unmap_again(addresses, False, faults)
                if self.pages.count > kept:
                    trim_range(self, addresses, self.pages.count - kept, views_too, wait, faults)
        return (before - self.pages.count) * self.page_size

    cdef int retire_all(self) noexcept nogil:
        cdef uint32_t number = 0
        cdef cbool is_kept
        while True:
            acquire_lock(self.lock[0])
            is_kept = False
            while number < self.pages.views.count() and not is_kept:
                is_kept = self.pages.is_kept(number)
                number += not is_kept
            self.lock.release()     # it may be taken now: `retire` looks again
            if not is_kept:
                return 0
            if self.retire(number) < 0:
                return -1
            number += 1

    cdef bint is_idle(self, uint64_t stream, bint wait, dict idle, Faults faults) noexcept:
        """Whether a stream has finished with what was queued until it was first asked for `idle`. That says nothing of
        memory that other threads have freed since."""
        try:
            if stream not in idle:
                idle[stream] = is_idle_now(self, stream, wait)
            return idle[stream]
        except BaseException as error:
            faults.add(error)
            return False

    cdef int unmap_held(self, AddressRange* addresses, Faults faults) except -1:
        """Unmaps and releases the pages of a range that are held."""
        cdef Run run
        cdef ChunkHandle handle
        self.is_unmapping = True
        try:
            while self.held.size():
                run = self.held.back()
                acquire_lock(self.lock[0])
                handle = self.pages.chunk_of(&run)      # LEAVING, so it stays
                self.lock.release()
                self.unmap_leaving(addresses, handle, False, faults)
                self.held.pop_back()
        finally:
            self.is_unmapping = False
        return 0

    # -- the end ------------------------------------------------------------------------------------------------------

    cdef void close(self, Faults faults) noexcept:
        cdef AddressRange* addresses
        cdef size_t i
        give_up_left(self, faults)
        self.let_held_go()
        forget_chunks(self)    # from here on nobody is handed any of it, and a free finds no chunk
        self.try_unreleased_again(faults)
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if self.count_mapped(addresses):        # else its stream may be gone
                self.wait_for(addresses, faults)    # even if the device fails, its memory is given back
            addresses.plan = NULL
        # Before the ranges: a page that a view has is not released with its last slot.
        close_views(self, faults)
        # From the end: a range whose addresses have gone leaves the list.
        i = self.ranges.size()
        while i > 0:
            i -= 1
            addresses = self.ranges.at(i)
            self.empty(addresses, faults)
            self.unreserve(addresses, faults)

    cdef void empty(self, AddressRange* addresses, Faults faults) noexcept:
        self.device.without_calls = is_set_asleep(self, addresses.bin_set)
        AddressRanges.empty(self, addresses, faults)
        self.device.without_calls = False

    # -- sleep --------------------------------------------------------------------------------------------------------

    cdef int list_mapped(self, TagTransition transition) except -1:
        cdef MappedRun run
        cdef set seen = set()
        if transition.tag.is_asleep:
            for run in self.left:
                if run.tag == transition.tag.number:
                    add_pages(transition, run, seen)
            return 0
        retire_views_of(self, transition.tag.number)
        return list_runs(self, transition, True)

    cdef int list_needed(self, TagTransition transition) except -1:
        return list_runs(self, transition, False)

    cdef int add_view(self, TagTransition transition, uint32_t number, bint is_mapped, set seen) except -1:
        cdef MappedRun run = MappedRun()
        cdef vector[uint32_t] numbers
        cdef cbool is_here
        acquire_lock(self.lock[0])
        run.ptr = self.pages.views.at(number).address
        run.nbytes = self.pages.views.at(number).pages * self.page_size
        is_here = is_of_tag(self, self.pages.views.at(number).set, transition.tag.number)
        self.lock.release()     # the view keeps its pages: only the mapper opens and retires views
        if not is_here:
            return 0
        run.is_mapped = is_mapped
        if not list_pages(self, number, numbers) or not pages_of(self, numbers, run.pages):
            raise out_of_host_memory()
        return add_pages(transition, run, seen)

    cdef void note_runs(self, TagTransition transition) noexcept:
        cdef MappedRun run
        cdef Py_ssize_t i = len(self.left)
        while i > 0:
            i -= 1
            if (<MappedRun>self.left[i]).tag == transition.tag.number:
                del self.left[i]
        for run in () if transition.is_up else transition.runs:
            if not run.is_block:
                keep_left(self, transition, run)
        self.left_count = len(self.left)

    cdef uint64_t bytes_held(self) noexcept:
        cdef MappedRun run
        cdef set pages = set()
        cdef size_t k
        for run in self.left:
            for k in range(run.pages.size()):
                pages.add(<size_t>run.pages[k].get())
        return len(pages) * self.page_size

    cdef uint64_t bytes_asleep(self) noexcept:
        cdef uint64_t found = 0
        cdef uint32_t i
        # What is mapped and what of it is free belong together, and frees go on while a tag sleeps.
        acquire_lock(self.lock[0])
        for i in range(<uint32_t>self.pool.bin_sets.size()):
            if self.pool.bin_sets[i].asleep and self.pool.bin_sets[i].is_range:
                found += self.pool.bin_sets[i].mapped_bytes - self.pages.count_free(i) * self.page_size
        self.lock.release()
        return found

    cdef void shrink(self, uint64_t tag) noexcept:
        cdef AddressRange* addresses
        cdef Faults faults = Faults()
        cdef size_t i
        self.device.without_calls = True
        forget_views_of(self, tag)
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if belongs_to(self, addresses, tag):
                shrink_range(self, addresses, faults)
        self.device.without_calls = False

    # -- a thread that is there no more -------------------------------------------------------------------------------

    cdef void take_over(self) noexcept:
        """Also frees the pages that the stopped thread held, except those that it unmapped."""
        cdef Place touched = self.device.touched, gone = self.device.going
        cdef MappedRun run
        self.device.without_calls = False
        AddressRanges.take_over(self)
        for run in self.left:
            if touched.nbytes and run.ptr == touched.ptr:
                run.note_unmapped()
        forget_retired(self, touched, gone)
        if self.is_unmapping:       # what is held may be unmapped already: it stays LEAVING
            self.is_unmapping = False
            self.held.clear()
        self.let_held_go()
        take_over_transitions(self)

    cdef void forget_touched(self, AddressRange* addresses) noexcept:
        cdef uint64_t ptr = self.device.touched.ptr
        cdef ChunkHandle handle = NO_CHUNK
        if is_set_asleep(self, addresses.bin_set):       # the records of what sleeps stay
            return
        AddressRanges.forget_touched(self, addresses)
        # The pool's records are changed under the lock, also where no other thread is left.
        acquire_lock(self.lock[0])
        if addresses.is_known:
            handle = self.pool.regions[addresses.ptr + addresses.nbytes].first
        while handle != NO_CHUNK and self.pool.chunks[handle].ptr != ptr:
            handle = self.pool.chunks[handle].next
        if handle != NO_CHUNK and self.pool.chunks[handle].state == MAPPED_ELSEWHERE:
            forget_absent(self.pool, handle)
            self.note_unmapped(addresses, NO_CHUNK)
        self.lock.release()

    # -- what can be seen ---------------------------------------------------------------------------------------------

    cdef str in_words(self):
        return f", in pages of {format_bytes(self.page_size)}"

    cdef str against_pieces(self):
        return ""

    cdef uint64_t bytes_beside_regions(self) noexcept:
        return self.unreleased_bytes()

    cdef const char* first_fault(self) noexcept nogil:
        return fault_in_pages(self.pages)

    cdef void set_limit(self, uint64_t limit, uint64_t allowed) noexcept nogil:
        self.limit = limit

    cdef int check_settings(self, settings) except -1:
        if settings.expandable_segments:
            raise SettingsError("expandable_segments and stitch=True cannot be combined: leave one out")
        return 0

    cdef int check_timing(self) except -1:
        raise ValueError("a timing counter belongs to TensorFlow's placement: virtual_memory=True has another")

    cdef int check_pages(self, str method) except -1:
        return 0

    cdef dict stats(self):
        """How much there is of everything, and what was called so far: for `page_stats`."""
        cdef uint64_t pages, used_pages, asleep, views = 0, slots, lost = 0
        cdef uint32_t number
        cdef AddressRange* addresses
        cdef ChunkHandle handle
        cdef size_t i, kept
        self.device.guard.begin_reading(self.lock[0])      # another thread may map
        pages = used_pages = self.pages.count
        slots = self.pages.views.slots()
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if not addresses.is_known:    # what is still mapped after close()
                lost += self.count_mapped(addresses)
                continue
            used_pages -= self.pages.count_free(addresses.bin_set)
            if self.pool.bin_sets[addresses.bin_set].asleep:
                asleep = self.pool.bin_sets[addresses.bin_set].mapped_bytes // self.page_size
                pages -= asleep
                used_pages -= asleep - self.pages.count_free(addresses.bin_set)
            handle = self.pool.regions[addresses.ptr + addresses.nbytes].first if addresses.some_stuck else NO_CHUNK
            while handle != NO_CHUNK:
                if self.pool.chunks[handle].state == LEAVING:
                    lost += self.pool.chunks[handle].size // self.page_size
                handle = self.pool.chunks[handle].next
        for number in range(self.pages.views.count()):
            views += self.pages.views.at(number).state in (KEPT, LIVE)
        for number in range(<uint32_t>self.pages.records.size()):
            slots += self.pages.records[number].slots.size()
        used_pages -= self.pages.count_idle()
        for i in range(self.retired.size()):
            kept = self.retired[i].get().pages.size()
            slots += kept
            lost += kept if self.retired[i].get().is_stuck else 0
        self.device.guard.end_reading(self.lock[0])
        cdef Calls counts = self.device.counts
        return {
            "page_size": self.page_size, "pages": pages + self.unreleased_bytes() // self.page_size,
            "pages_owned": used_pages, "views": views,
            "slots_mapped": slots, "stitches": counts.stitches, "creates": counts.creates, "maps": counts.maps,
            "set_accesses": counts.set_accesses, "unmaps": counts.unmaps, "releases": counts.releases,
            "stream_waits": counts.stream_waits, "most_calls_of_a_request": counts.most, "lost_slots": lost,
            "driver_seconds": counts.seconds,
        }
