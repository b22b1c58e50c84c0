"""Sleep and wake: memory goes and comes back while its addresses stay.

Either all of the tags of one call sleep afterwards, or none of them; a wake likewise. What fails in between is undone.
All runs are unmapped before the first page is released: until then the contents are there still, and mapping the pages
again undoes it. Only the thread between `enter` and `leave` does any of this.

A set of bins of a tag that sleeps is marked `asleep`. Its chunks stay as they are, so that a free needs to know
nothing; nobody looks for memory in it, and what it holds does not count as reserved.
"""

import gc
import time

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport EXPORTED, IN_USE, STATE, WAITING, Chunk, ChunkHandle
from bfc.buffers._buffer cimport HOST_STREAM
from bfc.allocators._ranges cimport count_asleep
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._source cimport Call
from bfc.allocators._fences cimport Fences
from bfc.allocators._tags cimport TAG_POOLS, Tag, some_sleep
from bfc.allocators._allocator cimport Allocator
from bfc.policies._mapper cimport Mapper, Page, call_create, lies_in

from bfc.errors import AsleepError, SettingsError, SubAllocatorError, out_of_host_memory
from bfc.policies.stash import Parcel, Stash, fill_with, maker
from bfc.snapshots.asleep import SleepReport
from bfc.snapshots.refusal import out_of_memory
from bfc.units import format_bytes

cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cbool try_push_live "bfc::try_push_back"(vector[Live]& items, const Live& item) noexcept
    cbool try_push_tag "bfc::try_push_back"(vector[uint64_t]& items, uint64_t item) noexcept

_POLL_SECONDS = 0.001


cdef void add_run(Nap nap, uint64_t ptr, uint64_t nbytes, list pages, bint is_mapped):
    """Adds pages that lie end to end. They must be new to the nap."""
    cdef Run run = Run()
    run.ptr = ptr
    run.nbytes = nbytes
    run.pages = pages
    run.is_mapped = is_mapped
    nap.runs.append(run)
    nap.pages.extend(pages)


def by_number(Tag tag):
    return tag.number


cdef list naps_of(ways, bint are_asleep):
    """A new Nap for each of the tags that sleep, or (`are_asleep` is False) that do not."""
    cdef list naps = []
    cdef Nap nap
    cdef Tag tag
    for tag in sorted(ways, key=by_number):
        if tag.is_asleep == are_asleep:
            nap = Nap()
            nap.tag = tag
            nap.way = None if are_asleep else ways[tag]
            nap.kept = tag.kept if are_asleep else None
            nap.runs = []
            nap.pages = []
            nap.is_waking = are_asleep
            naps.append(nap)
    return naps


@cython.final
cdef class Run:
    """Mapped memory that lies end to end, or the addresses for it."""

    cdef void note_unmapped(self) noexcept:
        cdef Page page
        self.is_mapped = False
        for page in self.pages:
            page.is_mapped = False


@cython.final
cdef class Nap:
    """A tag that is falling asleep, or waking."""

    cdef bint misses_pages(self) noexcept:
        cdef Page page
        for page in self.pages:
            if page.number is None:
                return True
        return False

    cdef void settle_pages(self) noexcept:
        """Notes which pages are mapped anywhere, after something has failed."""
        cdef Run run
        cdef Page page
        for run in self.runs:
            if run.is_mapped:
                for page in run.pages:
                    page.is_mapped = True


@cython.no_gc_clear
cdef class Sleeper(Mapper):
    """Memory that can sleep. It never calls the allocator."""

    cdef int know_tags(self, Fences fences, vector[uint64_t]* asleep) except -1:
        """Takes the allocator's fences, and its list of tags that sleep, which must live as long."""
        self.fences = fences
        self.asleep = asleep
        return 0

    cdef cbool is_of_tag(self, uint32_t bin_set, uint64_t number) noexcept nogil:
        cdef uint64_t* pool = self.pool.bin_sets[bin_set].lane.pool
        return pool[0] == TAG_POOLS and pool[1] == number

    cdef bint is_set_asleep(self, uint32_t bin_set) noexcept:
        return self.pool.bin_sets[bin_set].asleep != 0

    cdef int enter_or_wait(self) except -1:
        while not self.enter(0):
            if self.source.is_called_here():
                raise RuntimeError("a sub-allocator called sleep() or wake() of the allocator that was calling it")
            time.sleep(_POLL_SECONDS)
        self.try_unreleased_again(None)
        return 0

    # -- sleep --------------------------------------------------------------------------------------------------------

    cdef object put_to_sleep(self, dict ways):
        """Puts tags to sleep, all of them or none. Their contents go where `ways` says."""
        cdef list naps
        cdef Nap nap
        cdef Page page
        cdef list names = []
        cdef uint64_t released = 0, kept = 0
        begun = time.monotonic()
        self.enter_or_wait()
        try:
            naps = self.moving = naps_of(ways, False)
            self.sleep_all(naps)
            for nap in naps:
                names.append(nap.tag.name)
                kept += nap.kept.nbytes if nap.kept is not None else 0
                for page in nap.pages:
                    released += page.nbytes
            return SleepReport(tuple(names), released, kept, time.monotonic() - begun)
        finally:
            self.moving = None
            self.leave()

    cdef int sleep_all(self, list naps) except -1:
        cdef Nap nap
        try:
            for nap in naps:
                self.block(nap.tag.number)
            for nap in naps:
                self.mark(nap)
            self.wait_for_users(naps)
            for nap in naps:
                if nap.way is not None:
                    nap.kept = Stash(maker(nap.way, self.source.sub_allocator), self.source.sub_allocator,
                                     parcels_of(nap))
            for nap in naps:
                self.list_mapped(nap)
            self.take_down(naps)
        except BaseException as error:
            if not self.bring_back(naps):
                self.fall_asleep(naps)
                error.add_note("undoing it failed, too: the tags sleep all the same, and wake() can be tried")
            raise
        self.fall_asleep(naps)
        return 0

    cdef int block(self, uint64_t number) except -1:
        """Forbids allocations in a tag."""
        acquire_lock(self.lock[0])
        cdef cbool added = try_push_tag(self.asleep[0], number)
        self.lock.release()
        if not added:
            raise out_of_host_memory()
        return 0

    cdef void unblock(self, uint64_t number) noexcept:
        cdef size_t i
        acquire_lock(self.lock[0])
        for i in range(self.asleep.size()):
            if self.asleep[0][i] == number:
                self.asleep.erase(self.asleep.begin() + i)
                break
        self.lock.release()

    cdef int mark(self, Nap nap) except -1:
        """Forbids reading and exporting what lives in a tag, and lists it. It counts against the limit until the memory
        has gone."""
        cdef cbool exported = False, listed
        cdef uint64_t unmapped = 0, marked = 0
        cdef uint32_t i
        acquire_lock(self.lock[0])
        listed = self.list_live(nap, &exported, &unmapped)
        if listed and not exported and not unmapped:
            for i in range(<uint32_t>self.pool.bin_sets.size()):
                if self.pool.bin_sets[i].is_range and self.is_of_tag(i, nap.tag.number):
                    marked += count_asleep(self.pool, i, True)
            self.set_aside(nap, marked)
        self.lock.release()
        if not listed:
            raise out_of_host_memory()
        if exported:
            raise BufferError(f"another object holds a view of memory of tag {nap.tag.name!r} (an array, a "
                              f"memoryview): delete it first")
        if unmapped:
            raise SettingsError(f"{format_bytes(unmapped)} of tag {nap.tag.name!r} lie in ordinary segments, which "
                                f"cannot sleep", key="expandable_segments", allowed="True", where="sleep()",
                                hint="expandable_segments:True before the first allocation in the tag")
        return 0

    cdef int list_live(self, Nap nap, cbool* exported, uint64_t* unmapped) except -1 nogil:
        """Lists what lives in a tag. Whether the host has memory for the list. Needs the lock."""
        cdef ChunkHandle handle
        cdef Chunk* chunk
        nap.live.clear()
        for handle in range(<ChunkHandle>self.pool.chunk_count):
            chunk = &self.pool.chunks[handle]
            if chunk.state & STATE not in (IN_USE, WAITING) or not self.is_of_tag(chunk.bin_set, nap.tag.number):
                continue
            exported[0] = exported[0] or chunk.state & EXPORTED
            if not self.pool.bin_sets[chunk.bin_set].is_range:
                unmapped[0] += chunk.size
            elif chunk.state & STATE == IN_USE and not try_push_live(
                    nap.live, Live(chunk.ptr, chunk.requested_size, chunk.stream, chunk.allocation_id, handle)):
                return False
        return True

    cdef void set_aside(self, Nap nap, int64_t nbytes) noexcept nogil:
        """Counts bytes against the limit, or no longer, also for a fork in a call. Needs the lock."""
        cdef Call* call = self.source.newest_call()
        nap.aside += nbytes
        self.source.set_aside += nbytes
        if call != NULL:
            call.nbytes += nbytes

    cdef void unmark(self, Nap nap) noexcept:
        """Restores the state from before `block` and `mark`, or from before the tag fell asleep."""
        cdef uint32_t i
        acquire_lock(self.lock[0])
        self.set_aside(nap, -<int64_t>nap.aside)
        for i in range(<uint32_t>self.pool.bin_sets.size()):
            if self.pool.bin_sets[i].asleep and self.is_of_tag(i, nap.tag.number):
                count_asleep(self.pool, i, False)
        self.pool.counters.peak_pool_bytes = max(self.pool.counters.peak_pool_bytes, self.pool.counters.pool_bytes)
        self.lock.release()
        self.unblock(nap.tag.number)

    cdef int wait_for_users(self, list naps) except -1:
        """Waits for the streams that use what lives in the tags, and for those of their ranges."""
        cdef set streams = set()
        cdef Nap nap
        cdef Live live
        cdef uint32_t i
        cdef int result
        sub_allocator = self.source.sub_allocator
        for nap in naps:
            for live in nap.live:
                streams.add(live.stream)
                streams.update(self.fences.users.get(live.allocation_id, ()))
            for i in range(<uint32_t>self.pool.bin_sets.size()):
                if self.pool.bin_sets[i].asleep and self.is_of_tag(i, nap.tag.number):
                    streams.add(self.pool.bin_sets[i].lane.stream)
        streams.discard(<uint64_t>HOST_STREAM)
        for stream in sorted(streams):
            sub_allocator.wait(stream)
        if not streams.isdisjoint(sub_allocator.thread_streams) and self.source.native != NULL:
            with nogil:     # its handle names another stream in each thread
                result = self.source.native.synchronize(self.source.native.self)
            if result != 0:
                raise SubAllocatorError(f"{sub_allocator!r} failed with {result} while sleep() waited for the device")
        return 0

    cdef int take_down(self, list naps) except -1:
        """Unmaps all runs, and then releases their pages."""
        cdef Nap nap
        cdef Run run
        cdef Page page
        sub_allocator = self.source.sub_allocator
        for nap in naps:
            for run in nap.runs:
                sub_allocator.unmap(run.ptr, run.nbytes)
                run.note_unmapped()
        for nap in naps:
            for page in nap.pages:
                sub_allocator.release(page.number)
                page.number = None
        return 0

    cdef bint bring_back(self, list naps) noexcept:
        """Undoes a sleep that failed. False: undoing it failed, too, and everything that could be unmapped is unmapped.
        """
        cdef Nap nap
        cdef list emptied = []
        try:
            for nap in naps:
                if nap.kept is not None and nap.misses_pages():
                    emptied.append(nap)
            self.put_up(naps)
            for nap in emptied:
                nap.kept.bring_back(self.alive(nap.kept))
        except BaseException:
            self.go_down(naps)
            return False
        for nap in naps:
            nap.is_up = True
            self.note_runs(nap)
            self.unmark(nap)
            close_kept(nap.kept)
        return True

    cdef list alive(self, kept):
        """Which of the parcels of a stash are live still."""
        cdef vector[Live] parcels
        cdef list found = []
        cdef size_t i
        for parcel in kept.parcels:
            parcels.push_back(Live(0, 0, 0, parcel.allocation_id, parcel.handle))
        acquire_lock(self.lock[0])
        for i in range(parcels.size()):
            parcels[i].nbytes = self.pool.chunks[parcels[i].handle].allocation_id == parcels[i].allocation_id
        self.lock.release()
        for i in range(parcels.size()):
            found.append(parcels[i].nbytes != 0)
        return found

    cdef void fall_asleep(self, list naps) noexcept:
        """Records that the tags are asleep: their memory has gone."""
        cdef Nap nap
        for nap in naps:
            self.note_runs(nap)
            acquire_lock(self.lock[0])
            self.set_aside(nap, -<int64_t>nap.aside)
            self.lock.release()
            nap.tag.is_asleep = True
            nap.tag.kept = nap.kept
            self.shrink(nap.tag)
        self.note_held()
        self.note_change()

    cdef void note_held(self) noexcept:
        """Counts against the limit what is mapped where tags sleep."""
        cdef uint64_t held = self.bytes_held()
        if held != self.held:
            self.source.keep_bytes(<int64_t>held - <int64_t>self.held)
            self.held = held

    # -- mapping ------------------------------------------------------------------------------------------------------

    cdef int put_up(self, list naps) except -1:
        """Makes the pages of the naps that are not there, and maps the runs that are not mapped: all, or none."""
        cdef Nap nap
        cdef Run run
        cdef Page page, spare
        cdef list mapped = [], made = []
        try:
            for nap in naps:
                for page in nap.pages:
                    if page.number is None:
                        made.append((page, Page()))
                        page.number = call_create(self.source.sub_allocator, page.nbytes)
                        if page.number is None:
                            self.source.refused_bytes.set(page.nbytes)
                            raise NoRoomError
            for nap in naps:
                for run in nap.runs:
                    if not run.is_mapped:
                        self.map_run(run, mapped)
        except BaseException:
            for run in mapped:
                self.unmap_quietly(run)
            for nap in naps:
                nap.settle_pages()
            for page, spare in made:
                if page.number is not None and not page.is_mapped:
                    spare.number, spare.nbytes, page.number = page.number, page.nbytes, None
                    self.release_page(spare, None)
            raise
        for nap in naps:
            for page in nap.pages:
                page.is_mapped = True
        return 0

    cdef int map_run(self, Run run, list mapped) except -1:
        cdef Page page
        cdef uint64_t ptr = run.ptr
        cdef list numbers = []
        for page in run.pages:
            numbers.append(page.number)
        sub_allocator = self.source.sub_allocator
        mapped.append(run)
        try:
            sub_allocator.map(run.ptr, numbers)
        except BaseException as error:
            lost = getattr(error, "lost", ())
            run.lost = list(lost)
            for page in run.pages:
                page.is_mapped = page.is_mapped or (len(lost) > 0 and lies_in(ptr, lost))
                ptr += page.nbytes
            raise
        run.is_mapped = True
        sub_allocator.set_access(run.ptr, run.nbytes)
        return 0

    cdef void unmap_quietly(self, Run run) noexcept:
        if run.is_mapped:
            try:
                self.source.sub_allocator.unmap(run.ptr, run.nbytes)
                run.note_unmapped()
            except BaseException:
                pass    # it is tried again when the tag wakes

    cdef void go_down(self, list naps) noexcept:
        """Unmaps and releases what can be, after something has failed."""
        cdef Nap nap
        cdef Run run
        cdef Page page
        for nap in naps:
            for run in nap.runs:
                self.unmap_quietly(run)
        for nap in naps:
            nap.settle_pages()
        for nap in naps:
            for page in nap.pages:
                if page.number is not None and not page.is_mapped:
                    self.give_page_up(page)
            self.note_runs(nap)

    # -- wake ---------------------------------------------------------------------------------------------------------

    cdef uint64_t wake_up(self, list tags, object fill, uint64_t allowed) except? 0xFFFFFFFFFFFFFFFF:
        """Wakes those of the tags that sleep: all, or none. Returns 0, or the bytes that there is no room for.
        `allowed`: the limit."""
        cdef list naps
        cdef Nap nap
        cdef uint64_t needed = 0
        self.enter_or_wait()
        try:
            naps = self.moving = naps_of(tags, True)
            for nap in naps:
                if nap.tag.is_broken:
                    raise AsleepError(f"the contents of tag {nap.tag.name!r} were lost: the process was forked while "
                                      f"they were copied. Free its allocations, or close the allocator")
            for nap in naps:
                self.give_up_held(nap)
                self.shrink(nap.tag)
                self.list_needed(nap)
            self.note_held()
            if not self.take_room(naps, allowed, &needed):
                return needed
            try:
                self.put_up(naps)
                for nap in naps:
                    self.fill_in(nap, fill)
            except BaseException as error:
                self.go_down(naps)
                for nap in naps:
                    acquire_lock(self.lock[0])
                    self.set_aside(nap, -<int64_t>nap.aside)
                    self.lock.release()
                self.note_held()
                if isinstance(error, NoRoomError):
                    return needed
                raise
            self.rise(naps)
            return 0
        finally:
            self.moving = None
            self.leave()

    cdef int give_up_held(self, Nap nap) except -1:
        """Unmaps what is still mapped in a tag that sleeps, and releases it."""
        cdef Nap before = Nap()
        cdef Run run
        cdef Page page
        before.tag = nap.tag
        before.runs = []
        before.pages = []
        self.list_mapped(before)
        try:
            for run in before.runs:
                self.source.sub_allocator.unmap(run.ptr, run.nbytes)
                run.note_unmapped()
        finally:
            before.settle_pages()
            for page in before.pages:
                if page.number is not None and not page.is_mapped:
                    self.give_page_up(page)
            self.note_runs(before)
        return 0

    cdef void give_page_up(self, Page page) noexcept:
        """Releases a page that a subclass has in its books, and that is to be made anew."""
        cdef Page spare
        try:
            spare = Page()
        except MemoryError:
            return      # it stays held
        spare.number, spare.nbytes, page.number = page.number, page.nbytes, None
        self.release_page(spare, None)

    cdef bint take_room(self, list naps, uint64_t allowed, uint64_t* needed) except -1:
        """Sets what is to be mapped aside from the limit. Whether there is room."""
        cdef Nap nap
        cdef Page page
        cdef uint64_t nbytes, taken
        cdef cbool fits
        for nap in naps:
            for page in nap.pages:
                needed[0] += page.nbytes
        acquire_lock(self.lock[0])
        taken = self.source.taken()
        fits = needed[0] == 0 or (needed[0] <= allowed and taken <= allowed - needed[0])
        if not fits:
            self.source.refused_bytes.set(0)
        self.lock.release()
        for nap in naps if fits else ():
            nbytes = 0
            for page in nap.pages:
                nbytes += page.nbytes
            acquire_lock(self.lock[0])
            self.set_aside(nap, nbytes)
            self.lock.release()
        return fits

    cdef int fill_in(self, Nap nap, object fill) except -1:
        """Copies back what was kept, or fills memory that was dropped."""
        cdef cbool exported = False
        cdef uint64_t unmapped = 0
        cdef bint listed
        if nap.kept is not None:
            nap.kept.bring_back(self.alive(nap.kept))
        elif fill is not None:
            acquire_lock(self.lock[0])
            listed = self.list_live(nap, &exported, &unmapped)
            self.lock.release()
            if not listed:
                raise out_of_host_memory()
            fill_with(self.source.sub_allocator, parcels_of(nap), fill)
        return 0

    cdef void rise(self, list naps) noexcept:
        """Records that the tags are awake."""
        cdef Nap nap
        for nap in naps:
            nap.is_up = True
            self.note_runs(nap)
            nap.tag.is_asleep = False
            nap.tag.kept = None
            self.unmark(nap)
            close_kept(nap.kept)
        self.note_held()
        self.note_change()

    # -- forks --------------------------------------------------------------------------------------------------------

    cdef void take_over_naps(self) noexcept:
        """In a forked child, ends the sleep or wake that another thread was in the middle of, as that thread does not
        exist here: its tags sleep. It is not known how much of their memory is mapped, so each page is tried."""
        cdef list naps = self.moving
        cdef Nap nap
        cdef Run run
        cdef Page page
        cdef uint64_t ptr
        self.moving = None
        for nap in naps or ():
            try:
                if not nap.runs:
                    self.list_mapped(nap)   # that thread had not got so far
            except BaseException:
                pass
            for run in nap.runs:
                ptr = run.ptr
                for page in run.pages:
                    try:
                        self.source.sub_allocator.unmap(ptr, page.nbytes)
                    except BaseException:
                        pass
                    ptr += page.nbytes
                run.note_unmapped()
            for page in nap.pages:
                page.is_mapped = False
                try:
                    if page.number is not None:
                        self.source.sub_allocator.release(page.number)
                except BaseException:
                    pass
                page.number = None
            nap.tag.is_broken = not nap.is_waking and nap.way is not None
            nap.kept = nap.tag.kept if nap.is_waking else None
            nap.aside = 0       # what was set aside for that thread's calls is forgotten with them
        if naps:
            self.fall_asleep(naps)

    # -- what a subclass overrides ------------------------------------------------------------------------------------

    cdef int list_mapped(self, Nap nap) except -1:
        return 0

    cdef int list_needed(self, Nap nap) except -1:
        return 0

    cdef void note_runs(self, Nap nap) noexcept:
        pass

    cdef void shrink(self, Tag tag) noexcept:
        pass

    cdef uint64_t bytes_held(self) noexcept:
        return 0

    cdef uint64_t bytes_asleep(self) noexcept:
        return 0


class NoRoomError(Exception):
    """The device has no memory for all pages of a tag."""


cdef list parcels_of(Nap nap):
    cdef list found = []
    cdef Live live
    for live in nap.live:
        found.append(Parcel(live.ptr, live.nbytes, live.handle, live.allocation_id))
    return found


cdef void close_kept(kept) noexcept:
    if kept is not None:
        try:
            kept.close()
        except BaseException:
            pass        # memory of the user's, or of a driver that fails: nobody could do anything about it


cdef object put_tags_to_sleep(Allocator allocator, Sleeper sleeper, dict ways):
    """What `sleep` does, where memory is mapped."""
    if allocator.device.kind == "simulated" and any(map(is_something, ways.values())):
        raise SettingsError("a simulated device has no contents that could be kept", key="keep", where="sleep()",
                            hint="drop=[...], or a bfc.HostSubAllocator, whose memory can be written")
    allocator.settle(True, True)    # what was freed and waits for other streams
    return sleeper.put_to_sleep(ways)


cdef int wake_tags(Allocator allocator, Sleeper sleeper, list tags, object fill, uint64_t allowed) except -1:
    """What `wake` does, where memory is mapped."""
    cdef uint64_t needed
    if not some_sleep(tags):
        return 0
    if fill is not None and allocator.device.kind == "simulated":
        raise SettingsError("a simulated device has no contents to fill", key="fill", where="wake()")
    needed = sleeper.wake_up(tags, fill, allowed)
    if needed:
        gc.collect()    # buffers in reference cycles
        allocator.release_free_regions()
        needed = sleeper.wake_up(tags, fill, allowed)
    if needed:
        refused_by = repr(allocator.sub_allocator) if allocator.source.refused_bytes.get() else ""
        raise out_of_memory(needed, allocator.stats(), allocator.sub_allocator.total_bytes, refused_by,
                            look=allocator._look)
    return 0


def is_something(way):
    return way is not None
