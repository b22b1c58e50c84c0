"""Sleep and wake: memory goes and comes back while its addresses stay.

Either all of the tags of one call sleep afterwards, or none of them; a wake likewise. What fails in between is undone.
All runs are unmapped before the first page is released: until then the contents are there still, and mapping the pages
again undoes it. Only the thread between `enter` and `leave` does any of this.

A set of bins of a tag that sleeps is marked `asleep`. Its chunks stay as they are, so that a free needs to know
nothing; nobody looks for memory in it, and what it holds does not count as reserved.
"""

import time

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_push_back
from bfc._core cimport (
    EXPORTED, HISTORY_ANNOTATE, IN_USE, STATE, WAITING, BinSet, Chunk, ChunkHandle, HistoryRecord,
)
from bfc.buffers._scopes cimport number_of_owner
from bfc.buffers._buffer cimport HOST_STREAM
from bfc.allocators._changes cimport count_asleep
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._source cimport Call
from bfc.allocators._tags cimport TAG_POOLS, Tag
from bfc.allocators.mapping._address_ranges cimport (
    AddressRanges, Live, MappedRun, Page, PageRef, TagTransition, call_create, is_of_tag, lies_in, new_page,
    note_number, number_of,
)
from bfc.allocators.mapping._blocks cimport Blocks

from bfc.allocators.mapping.host_copy import HostCopy, SavedAllocation, fill_with, maker
from bfc.errors import AsleepError, SettingsError, SubAllocatorError, out_of_host_memory
from bfc.pytorch.words import SLEEPS, WAKES
from bfc.snapshots.asleep import SleepReport
from bfc.units import format_bytes

cdef extern from "history.hpp":     # what _core.pxd only names
    pass

_POLL_SECONDS = 0.001


cdef uint64_t page_bytes(TagTransition transition) noexcept:
    """The bytes of all pages of a transition."""
    cdef uint64_t nbytes = 0
    cdef size_t i
    for i in range(transition.pages.size()):
        nbytes += transition.pages[i].get().nbytes
    return nbytes


def by_number(Tag tag):
    return tag.number


cdef list transitions_of(ways, bint are_asleep):
    """A new TagTransition for each of the tags that sleep, or (`are_asleep` is False) that do not."""
    cdef list transitions = []
    cdef TagTransition transition
    cdef Tag tag
    # In one order, whatever the user's is: a report, and the calls of the driver, are the same in each run.
    for tag in sorted(ways, key=by_number):
        if tag.is_asleep == are_asleep:
            transition = TagTransition()
            transition.tag = tag
            transition.way = None if are_asleep else ways[tag]
            transition.kept = tag.kept if are_asleep else None
            transition.runs = []
            transition.is_waking = are_asleep
            transitions.append(transition)
    return transitions


cdef int enter_or_wait(AddressRanges memory) except -1:
    while not memory.enter(0):
        # It would wait for itself.
        if memory.source.is_called_here():
            raise RuntimeError("a sub-allocator called sleep() or wake() of the allocator that was calling it")
        time.sleep(_POLL_SECONDS)
    # Pages that were not taken back count against the limit, and may be what is missing.
    memory.try_unreleased_again(None)
    return 0


# -- sleep --------------------------------------------------------------------------------------------------------

cdef object put_to_sleep(AddressRanges memory, dict ways, object keep_limit):
    """Puts tags to sleep, all of them or none. Their contents go where `ways` says."""
    cdef list transitions
    cdef TagTransition transition
    cdef list names = []
    cdef uint64_t released = 0, kept = 0
    begun = time.monotonic()
    enter_or_wait(memory)
    try:
        # From here on a forked child can tell what this thread was doing.
        transitions = memory.moving = transitions_of(ways, False)
        sleep_all(memory, transitions, keep_limit)
        for transition in transitions:
            names.append(transition.tag.name)
            kept += transition.kept.nbytes if transition.kept is not None else 0
            released += page_bytes(transition)
        return SleepReport(tuple(names), released, kept, time.monotonic() - begun)
    finally:
        memory.moving = None
        memory.leave()


cdef int sleep_all(AddressRanges memory, list transitions, object keep_limit) except -1:
    cdef TagTransition transition
    try:
        # First nothing new can be allocated, and then what lives is marked and listed, so the list is complete. Frees
        # may come at any time: they need no memory.
        for transition in transitions:
            block(memory, transition.tag.number)
        for transition in transitions:
            mark(memory, transition)
        # When nothing can be allocated any more, so that the sum is of all, and before anything is copied.
        refuse_too_much(memory, transitions, keep_limit)
        # Before the copy: kernels may still write what is to be kept.
        wait_for_users(memory, transitions)
        for transition in transitions:
            if transition.way is not None:
                transition.kept = HostCopy(maker(transition.way, memory.source.sub_allocator),
                                           memory.source.sub_allocator, saved_allocations(transition))
        for transition in transitions:
            list_mapped(memory, transition)
        take_down(memory, transitions)
    except BaseException as error:
        # All or none, so that a program that catches the error goes on as before.
        if not bring_back(memory, transitions):
            fall_asleep(memory, transitions)
            error.add_note("undoing it failed, too: the tags sleep all the same, and wake() can be tried")
        raise
    fall_asleep(memory, transitions)
    return 0


cdef int refuse_too_much(AddressRanges memory, list transitions, object keep_limit) except -1:
    """Raises MemoryError if the host would hold more than that, with what it holds of tags that sleep already."""
    cdef TagTransition transition
    cdef Live live
    cdef Tag tag
    cdef uint64_t wanted = 0, held = 0
    if keep_limit is None:
        return 0
    for transition in transitions:
        if transition.way is not None:
            for live in transition.live:
                wanted += live.nbytes
    for tag in list(memory.tags.by_name.values()):
        held += tag.kept.nbytes if tag.kept is not None else 0
    # What sleeps already counts, and is no reason to refuse a sleep that keeps nothing.
    if wanted and held + wanted > <uint64_t>keep_limit:
        raise MemoryError(f"{format_bytes(wanted)} are to be kept on the host, which holds {format_bytes(held)} of "
                          f"tags that sleep, and keep_limit is {format_bytes(keep_limit)}: nothing has changed. Drop "
                          f"more tags, wake some, or keep them in a file, by a callable")
    return 0


cdef int block(AddressRanges memory, uint64_t number) except -1:
    """Forbids allocations in a tag."""
    # `place` reads this list under the lock: from here on no request gets memory of the tag.
    acquire_lock(memory.lock[0])
    cdef cbool added = try_push_back(memory.tags.asleep, number)
    memory.lock.release()
    if not added:
        raise out_of_host_memory()
    return 0


cdef void unblock(AddressRanges memory, uint64_t number) noexcept:
    cdef size_t i
    # `place` reads this list under the lock.
    acquire_lock(memory.lock[0])
    for i in range(memory.tags.asleep.size()):
        if memory.tags.asleep[i] == number:
            memory.tags.asleep.erase(memory.tags.asleep.begin() + i)
            break
    memory.lock.release()


cdef int mark(AddressRanges memory, TagTransition transition) except -1:
    """Forbids reading and exporting what lives in a tag, and lists it. It counts against the limit until the memory
    has gone."""
    cdef cbool exported = False, listed
    cdef uint64_t unmapped = 0, marked = 0
    cdef uint32_t i
    acquire_lock(memory.lock[0])
    listed = list_live(memory, transition, &exported, &unmapped)
    if listed and not exported and not unmapped:
        for i in range(<uint32_t>memory.pool.bin_sets.size()):
            if is_of_tag(memory, i, transition.tag.number):
                marked += count_asleep(memory.pool, i, True)
        set_aside(memory, transition, marked)   # under the same lock: no other thread may find the limit free
    memory.lock.release()
    if not listed:
        raise out_of_host_memory()
    if exported:
        raise BufferError(f"another object holds a view of memory of tag {transition.tag.name!r} (an array, a "
                          f"memoryview): delete it first")
    if unmapped:
        raise SettingsError(f"{format_bytes(unmapped)} of tag {transition.tag.name!r} lie in ordinary segments, "
                            f"which cannot sleep", key="expandable_segments", allowed="True", where="sleep()",
                            hint="expandable_segments:True before the first allocation in the tag")
    return 0


cdef int list_live(AddressRanges memory, TagTransition transition, cbool* exported, uint64_t* unmapped) except -1 nogil:
    """Lists what lives in a tag. Whether the host has memory for the list. Needs the lock."""
    cdef ChunkHandle handle
    cdef Chunk* chunk
    cdef BinSet* owner
    transition.live.clear()
    for handle in range(<ChunkHandle>memory.pool.chunk_count):
        chunk = &memory.pool.chunks[handle]
        if chunk.state & STATE not in (IN_USE, WAITING) or not is_of_tag(memory, chunk.bin_set, transition.tag.number):
            continue
        exported[0] = exported[0] or chunk.state & EXPORTED
        owner = &memory.pool.bin_sets[chunk.bin_set]
        # Such a region is cudaMalloc's, whose addresses cannot be kept without its memory.
        if not owner.is_range and owner.lane.pool[0] == TAG_POOLS:
            unmapped[0] += chunk.size
        elif chunk.state & STATE == IN_USE and not try_push_back(
                transition.live, Live(chunk.ptr, chunk.requested_size, chunk.stream, chunk.allocation_id, handle)):
            return False
    return True


cdef void set_aside(AddressRanges memory, TagTransition transition, int64_t nbytes) noexcept nogil:
    """Counts bytes against the limit, or no longer, also for a fork in a call. Needs the lock."""
    cdef Call* call = memory.source.newest_call()
    transition.aside += nbytes
    memory.source.set_aside += nbytes
    if call != NULL:
        call.nbytes += nbytes


cdef void unmark(AddressRanges memory, TagTransition transition) noexcept:
    """Restores the state from before `block` and `mark`, or from before the tag fell asleep."""
    cdef uint32_t i
    acquire_lock(memory.lock[0])
    set_aside(memory, transition, -<int64_t>transition.aside)
    for i in range(<uint32_t>memory.pool.bin_sets.size()):
        if memory.pool.bin_sets[i].asleep and is_of_tag(memory, i, transition.tag.number):
            count_asleep(memory.pool, i, False)
    # What wakes counts as reserved again, without a region that comes.
    memory.pool.counters.peak_pool_bytes = max(memory.pool.counters.peak_pool_bytes, memory.pool.counters.pool_bytes)
    memory.lock.release()       # a request in the tag is still refused, until `unblock`
    unblock(memory, transition.tag.number)


cdef int wait_for_users(AddressRanges memory, list transitions) except -1:
    """Waits for the streams that use what lives in the tags, and for those of their ranges."""
    cdef set streams = set()
    cdef TagTransition transition
    cdef Live live
    cdef vector[uint64_t] of_ranges
    cdef uint64_t stream
    cdef cbool listed = True
    cdef uint32_t i
    cdef int result
    sub_allocator = memory.source.sub_allocator
    for transition in transitions:
        for live in transition.live:
            streams.add(live.stream)
            memory.fences.adopt(live.allocation_id)
            streams.update(memory.fences.users.get(live.allocation_id, ()))
        acquire_lock(memory.lock[0])
        for i in range(<uint32_t>memory.pool.bin_sets.size()):
            if memory.pool.bin_sets[i].asleep and is_of_tag(memory, i, transition.tag.number):
                listed = listed and try_push_back(of_ranges, memory.pool.bin_sets[i].lane.stream)
        memory.lock.release()       # no range is added: the tag is blocked, so nothing is allocated in it
    if not listed:
        raise out_of_host_memory()
    for stream in of_ranges:
        streams.add(stream)
    # No stream of a driver's: nothing queues work on it.
    streams.discard(<uint64_t>HOST_STREAM)
    for stream in sorted(streams):
        sub_allocator.wait(stream)
    # A handle of a thread's stream names another one in each thread, and a graph may have been launched on any.
    if ((memory.source.has_blocks or not streams.isdisjoint(sub_allocator.thread_streams))
            and memory.source.native != NULL):
        with nogil:
            result = memory.source.native.synchronize(memory.source.native.self)
        if result != 0:
            raise SubAllocatorError(f"{sub_allocator!r} failed with {result} while sleep() waited for the device")
    return 0


cdef int take_down(AddressRanges memory, list transitions) except -1:
    """Unmaps all runs, and then releases their pages. It needs no lock: nobody is handed memory of a tag that is
    blocked, what lives there may not be read, and only the mapper looks at pages."""
    cdef TagTransition transition
    cdef MappedRun run
    cdef Page* page
    cdef size_t i
    sub_allocator = memory.source.sub_allocator
    for transition in transitions:
        for run in transition.runs:
            # All of it before a page is released: until then, mapping the same pages again undoes everything without a
            # copy.
            sub_allocator.unmap(run.ptr, run.nbytes)
            run.note_unmapped()
    for transition in transitions:
        for i in range(transition.pages.size()):
            page = transition.pages[i].get()
            sub_allocator.release(number_of(page.number))
            page.is_made = False
    return 0


cdef bint bring_back(AddressRanges memory, list transitions) noexcept:
    """Undoes a sleep that failed. False: undoing it failed, too, and everything that could be unmapped is unmapped.
    """
    cdef TagTransition transition
    cdef list emptied = []
    try:
        for transition in transitions:
            # If no page was released, the contents are still there.
            if transition.kept is not None and transition.misses_pages():
                emptied.append(transition)
        put_up(memory, transitions)
        for transition in emptied:
            transition.kept.bring_back(alive(memory, transition.kept))
    except BaseException:
        go_down(memory, transitions)
        return False
    for transition in transitions:
        transition.is_up = True
        memory.note_runs(transition)
        unmark(memory, transition)
        close_kept(transition.kept)
    return True


cdef list alive(AddressRanges memory, kept):
    """Which of the saved allocations are live still."""
    cdef vector[Live] saved
    cdef list found = []
    cdef size_t i
    for allocation in kept.allocations:
        # By handle and id: the handle's record may be another chunk's by now.
        saved.push_back(Live(0, 0, 0, allocation.allocation_id, allocation.handle))
    # The host's copies are compared with what lives at one moment.
    acquire_lock(memory.lock[0])
    for i in range(saved.size()):
        saved[i].nbytes = memory.pool.chunks[saved[i].handle].allocation_id == saved[i].allocation_id
    memory.lock.release()
    # One that is freed from here on is copied back for nothing: nobody gets its addresses while the tag is blocked.
    for i in range(saved.size()):
        found.append(saved[i].nbytes != 0)
    return found


cdef void fall_asleep(AddressRanges memory, list transitions) noexcept:
    """Records that the tags are asleep: their memory has gone."""
    cdef TagTransition transition
    for transition in transitions:
        memory.note_runs(transition)
        acquire_lock(memory.lock[0])
        set_aside(memory, transition, -<int64_t>transition.aside)
        memory.lock.release()       # the tag is blocked until it wakes: nobody allocates before it counts as asleep
        transition.tag.is_asleep = True
        transition.tag.kept = transition.kept
        memory.shrink(transition.tag.number)
    note_held(memory)
    memory.note_change()
    note_in_history(memory, transitions, SLEEPS)


cdef void note_in_history(AddressRanges memory, list transitions, str said) noexcept:
    """Writes into a history which tags fell asleep, or woke, and the bytes of their pages."""
    cdef TagTransition transition
    cdef HistoryRecord record
    # A history may be started or ended by another thread.
    acquire_lock(memory.lock[0])
    cdef bint is_recorded = memory.pool.books.history != NULL
    memory.lock.release()
    for transition in transitions if is_recorded else ():
        try:
            record.owner = number_of_owner(said + transition.tag.name)
        except BaseException:
            continue    # no memory or no number for the name: what has happened stands
        record.action = <uint32_t>HISTORY_ANNOTATE
        record.addr = record.stream = 0
        record.size = page_bytes(transition)
        record.pool[0], record.pool[1] = TAG_POOLS, transition.tag.number
        record.allocation_id = 0
        # The history may have ended while the name was looked up, without the lock.
        acquire_lock(memory.lock[0])
        if memory.pool.books.history != NULL:
            memory.pool.books.history.add(record)
        memory.lock.release()


cdef void note_held(AddressRanges memory) noexcept:
    """Counts against the limit what is mapped where tags sleep."""
    cdef uint64_t held = memory.bytes_held()
    if memory.source.blocks is not None:
        held += (<Blocks>memory.source.blocks).bytes_of(True, True)
    # The difference in one step, since other threads may read the sum at any time.
    if held != memory.held:
        memory.source.keep_bytes(<int64_t>held - <int64_t>memory.held)
        memory.held = held


# -- mapping ------------------------------------------------------------------------------------------------------

cdef int list_mapped(AddressRanges memory, TagTransition transition) except -1:
    """Adds what is mapped of a tag, its regions of private pools, too."""
    memory.list_mapped(transition)
    return list_blocks(memory, transition, True)


cdef int list_needed(AddressRanges memory, TagTransition transition) except -1:
    """Adds what must be mapped so that a tag can wake: of a private pool also what was freed, since graphs use it."""
    memory.list_needed(transition)
    return list_blocks(memory, transition, False)


cdef int list_blocks(AddressRanges memory, TagTransition transition, bint mapped) except -1:
    if memory.source.blocks is None:
        return 0
    return (<Blocks>memory.source.blocks).list_for(transition, mapped)


cdef uint64_t bytes_asleep(AddressRanges memory) noexcept:
    """The bytes that must be mapped to wake everything that sleeps."""
    cdef uint64_t found = memory.bytes_asleep()
    if memory.source.blocks is not None:
        found += (<Blocks>memory.source.blocks).bytes_of(True, False)
    return found


cdef int put_up(AddressRanges memory, list transitions) except -1:
    """Makes the pages that are not there, and maps the runs that are not mapped: all, or none.

    No lock is needed: the tags are blocked, so other threads only free there, which changes neither runs nor pages. A
    child that is forked in a call finds them in `moving`.
    """
    cdef TagTransition transition
    cdef MappedRun run
    cdef vector[PageRef] made
    cdef list mapped = []
    cdef size_t i
    try:
        for transition in transitions:
            for i in range(transition.pages.size()):
                if not transition.pages[i].get().is_made:
                    made.push_back(transition.pages[i])
                    make_page(memory, transition.pages[i].get())
        for transition in transitions:
            for run in transition.runs:
                if not run.is_mapped:
                    map_run(memory, run, mapped)
    except BaseException:
        for run in mapped:
            unmap_quietly(memory, run)
        for transition in transitions:
            transition.settle_pages()
        for i in range(made.size()):
            if made[i].get().is_made and not made[i].get().is_mapped:
                give_page_up(memory, made[i].get())
        raise
    for transition in transitions:
        for i in range(transition.pages.size()):
            transition.pages[i].get().is_mapped = True
    return 0


cdef int make_page(AddressRanges memory, Page* page) except -1:
    sub_allocator = memory.source.sub_allocator
    number = call_create(sub_allocator, sub_allocator, page.nbytes)
    if number is None:
        memory.source.refused_bytes.set(page.nbytes)
        raise NoRoomError
    return note_number(page, number)


cdef int map_run(AddressRanges memory, MappedRun run, list mapped) except -1:
    cdef Page* page
    cdef uint64_t ptr = run.ptr
    cdef list numbers = []
    cdef size_t i
    for i in range(run.pages.size()):
        numbers.append(number_of(run.pages[i].get().number))
    sub_allocator = memory.source.sub_allocator
    # Before the call: one that fails half-way must be undone as well.
    mapped.append(run)
    try:
        sub_allocator.map(run.ptr, numbers)
    except BaseException as error:
        lost = getattr(error, "lost", ())
        run.lost = list(lost)
        for i in range(run.pages.size()):
            page = run.pages[i].get()
            page.is_mapped = page.is_mapped or (len(lost) > 0 and lies_in(ptr, lost))
            ptr += page.nbytes
        raise
    run.is_mapped = True
    sub_allocator.set_access(run.ptr, run.nbytes)
    return 0


cdef void unmap_quietly(AddressRanges memory, MappedRun run) noexcept:
    if run.is_mapped:
        try:
            memory.source.sub_allocator.unmap(run.ptr, run.nbytes)
            run.note_unmapped()
        except BaseException:
            pass    # it is tried again when the tag wakes


cdef void go_down(AddressRanges memory, list transitions) noexcept:
    """Unmaps and releases what can be, after something has failed."""
    cdef TagTransition transition
    cdef MappedRun run
    for transition in transitions:
        for run in transition.runs:
            unmap_quietly(memory, run)
    for transition in transitions:
        transition.settle_pages()
    for transition in transitions:
        give_pages_up(memory, transition)
        memory.note_runs(transition)


# -- wake ---------------------------------------------------------------------------------------------------------

cdef uint64_t wake_up(AddressRanges memory, list tags, object fill) except? 0xFFFFFFFFFFFFFFFF:
    """Wakes those of the tags that sleep: all, or none. Returns 0, or the bytes that there is no room for."""
    cdef list transitions
    cdef TagTransition transition
    cdef uint64_t needed = 0
    enter_or_wait(memory)
    try:
        transitions = memory.moving = transitions_of(tags, True)
        for transition in transitions:
            if transition.tag.is_broken:
                raise AsleepError(f"the contents of tag {transition.tag.name!r} were lost: the process was forked "
                                  f"while they were copied. Free its allocations, or close the allocator")
        for transition in transitions:
            give_up_held(memory, transition)
            memory.shrink(transition.tag.number)
            list_needed(memory, transition)     # with what was freed since: it gets memory, and is free when awake
        note_held(memory)
        if not take_room(memory, transitions, &needed):
            return needed
        try:
            put_up(memory, transitions)
            for transition in transitions:
                fill_in(memory, transition, fill)
        except BaseException as error:
            go_down(memory, transitions)
            for transition in transitions:
                # Other threads read what is set aside whenever they need a region.
                acquire_lock(memory.lock[0])
                set_aside(memory, transition, -<int64_t>transition.aside)
                memory.lock.release()
            note_held(memory)
            # No error yet: the allocator gives back what it caches, and tries once more.
            if isinstance(error, NoRoomError):
                return needed
            raise
        rise(memory, transitions)
        return 0
    finally:
        memory.moving = None
        memory.leave()


cdef int give_up_held(AddressRanges memory, TagTransition transition) except -1:
    """Unmaps what is still mapped in a tag that sleeps, and releases it."""
    cdef TagTransition before = TagTransition()
    cdef MappedRun run
    before.tag = transition.tag
    before.runs = []
    list_mapped(memory, before)
    try:
        for run in before.runs:
            memory.source.sub_allocator.unmap(run.ptr, run.nbytes)
            run.note_unmapped()
    finally:
        before.settle_pages()
        give_pages_up(memory, before)
        memory.note_runs(before)
    return 0


cdef void give_pages_up(AddressRanges memory, TagTransition transition) noexcept:
    """Releases those pages of a transition that are mapped nowhere."""
    cdef Page* page
    cdef size_t i
    for i in range(transition.pages.size()):
        page = transition.pages[i].get()
        if page.is_made and not page.is_mapped:
            give_page_up(memory, page)


cdef void give_page_up(AddressRanges memory, Page* page) noexcept:
    """Releases a page that a subclass has in its books, and that is to be made anew."""
    cdef PageRef spare = new_page(page.nbytes)
    if spare.get() == NULL:
        return      # it stays held
    spare.get().number = page.number
    spare.get().is_made = True
    page.is_made = False
    memory.release_page(spare, None)


cdef bint take_room(AddressRanges memory, list transitions, uint64_t* needed) except -1:
    """Sets what is to be mapped aside from the limit. Whether there is room."""
    cdef TagTransition transition
    cdef vector[uint64_t] wanted
    cdef uint64_t taken
    cdef size_t i
    cdef cbool fits
    for transition in transitions:
        wanted.push_back(page_bytes(transition))
        needed[0] += wanted.back()
    acquire_lock(memory.lock[0])
    taken = memory.source.taken()
    # A tag of which all was freed needs no room, even in a pool above its limit.
    fits = needed[0] == 0 or (needed[0] <= memory.limit and taken <= memory.limit - needed[0])
    for i in range(wanted.size() if fits else 0):   # under the same lock: no other thread may find the limit free
        set_aside(memory, <TagTransition>transitions[i], wanted[i])
    if not fits:
        memory.source.refused_bytes.set(0)
    memory.lock.release()
    return fits


cdef int fill_in(AddressRanges memory, TagTransition transition, object fill) except -1:
    """Copies back what was kept, or fills memory that was dropped."""
    cdef cbool exported = False
    cdef uint64_t unmapped = 0
    cdef bint listed
    if transition.kept is not None:
        transition.kept.bring_back(alive(memory, transition.kept))
    elif fill is not None:
        # What lives is listed at one moment.
        acquire_lock(memory.lock[0])
        listed = list_live(memory, transition, &exported, &unmapped)
        memory.lock.release()
        if not listed:
            raise out_of_host_memory()
        # One that is freed meanwhile is filled for nothing: the tag is blocked, so nobody else gets its addresses.
        fill_with(memory.source.sub_allocator, saved_allocations(transition), fill)
    return 0


cdef void rise(AddressRanges memory, list transitions) noexcept:
    """Records that the tags are awake."""
    cdef TagTransition transition
    for transition in transitions:
        transition.is_up = True
        memory.note_runs(transition)
        transition.tag.is_asleep = False
        transition.tag.kept = None
        unmark(memory, transition)      # last: from here on other threads allocate in the tag, and all of it is mapped
        close_kept(transition.kept)
    note_held(memory)
    memory.note_change()
    note_in_history(memory, transitions, WAKES)


# -- forks --------------------------------------------------------------------------------------------------------

cdef void take_over_transitions(AddressRanges memory) noexcept:
    """In a forked child, ends the sleep or wake that another thread was in the middle of, as that thread does not
    exist here: its tags sleep. It is not known how much of their memory is mapped, so each page is tried."""
    cdef list transitions = memory.moving
    cdef TagTransition transition
    cdef MappedRun run
    cdef Page* page
    cdef uint64_t ptr
    cdef size_t i
    memory.moving = None
    for transition in transitions or ():
        try:
            if not transition.runs:
                list_mapped(memory, transition)  # that thread had not got so far
        except BaseException:
            pass
        for run in transition.runs:
            ptr = run.ptr
            for i in range(run.pages.size()):
                page = run.pages[i].get()
                try:
                    memory.source.sub_allocator.unmap(ptr, page.nbytes)
                except BaseException:
                    pass
                ptr += page.nbytes
            run.note_unmapped()
        for i in range(transition.pages.size()):
            page = transition.pages[i].get()
            page.is_mapped = False
            try:
                if page.is_made:
                    memory.source.sub_allocator.release(number_of(page.number))
            except BaseException:
                pass
            page.is_made = False
        # A copy that another thread was making is half done, and there is no telling which half.
        transition.tag.is_broken = not transition.is_waking and transition.way is not None
        transition.kept = transition.tag.kept if transition.is_waking else None
        transition.aside = 0       # what was set aside for that thread's calls is forgotten with them
    if transitions:
        fall_asleep(memory, transitions)


class NoRoomError(Exception):
    """The device has no memory for all pages of a tag."""


cdef list saved_allocations(TagTransition transition):
    cdef list found = []
    cdef Live live
    for live in transition.live:
        found.append(SavedAllocation(live.ptr, live.nbytes, live.handle, live.allocation_id))
    return found


cdef void close_kept(kept) noexcept:
    if kept is not None:
        try:
            kept.close()
        except BaseException:
            pass        # memory of the user's, or of a driver that fails: nobody could do anything about it
