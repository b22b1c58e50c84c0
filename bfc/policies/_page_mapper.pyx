"""The pages of an allocator: how they are made, mapped and given back. What a request does with them is _stitching.pyx.

Each stream has two ranges of addresses, one for small chunks and one for large ones, which are filled with pages from
the front. Only the thread between `enter` and `leave` calls the device (_mapper.pyx). What it has taken is `held`, and
nobody else uses it meanwhile.
"""

import time

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport LEAVING, NO_CHUNK, NO_HOST_MEMORY, NO_PAGE, UNMAPPED, Chunk, ChunkHandle, Lane, Window
from bfc.allocators._ranges cimport (
    add_range, begin_mapping, cancel_mapping, end_mapping, end_unmapping, forget_absent, remove_range,
)
from bfc.allocators._pages cimport KEPT, LIVE, RETIRED, Pages, Run, Slot, View
from bfc.allocators._lock cimport acquire_lock
from bfc.policies._mapper cimport Faults, Page, Place, call_create, call_reserve, lies_in
from bfc.policies._sleep cimport Sleeper

from bfc.errors import SubAllocatorError, out_of_host_memory

cdef extern from "window.hpp":
    pass


cdef uint64_t stream_to_ask(const Lane* lane) noexcept nogil:
    """The stream to ask whether work in a lane is done. A handle that names another stream in each thread cannot be
    asked from other threads; then it is stream 0, which runs after all of these streams."""
    return 0 if lane.thread else lane.stream


cdef list driver_numbers(list pages):
    cdef list numbers = []
    cdef Page page
    for page in pages:
        numbers.append(page.number)
    return numbers


@cython.final
@cython.no_gc_clear
cdef class Stretch:
    """Reserved addresses of one stream, for small or for large chunks."""


@cython.final
@cython.no_gc_clear
cdef class Retired:
    """A view that is to be unmapped once its stream has finished with it."""


@cython.no_gc_clear
cdef class PageMapper(Sleeper):
    """The pages of an allocator, and where they are mapped. It never calls the allocator."""

    def __cinit__(self):
        self.pages = Pages()
        self.stretches = []
        self.made = []
        self.fresh = []
        self.retired = []

    cdef int set_up(self, uint64_t limit, uint64_t page_size, double headroom) except -1:
        self.limit = self.highest_limit = limit
        self.page_size = page_size
        self.headroom = headroom
        self.pages.watch(self.pool, page_size)
        return 0

    cdef uint64_t count_calls(self) noexcept:
        """The calls made so far, without waits."""
        cdef Calls* calls = &self.calls
        return calls.creates + calls.maps + calls.set_accesses + calls.unmaps + calls.releases

    cdef void note_request(self, uint64_t calls_before) noexcept:
        self.calls.most = max(self.calls.most, self.count_calls() - calls_before)

    # -- ranges --------------------------------------------------------------------------------------------------------

    cdef Stretch stretch_of(self, uint32_t bin_set):
        cdef Stretch stretch
        for stretch in self.stretches:
            if stretch.bin_set == bin_set and stretch.is_known:
                return stretch
        return None

    cdef Stretch reserve(self, uint32_t bin_set):
        """Reserves addresses for as many pages as there can be, as each is mapped into a range once at most; and some
        more, in case that a few cannot be unmapped."""
        cdef Stretch stretch = Stretch()
        stretch.nbytes = (self.highest_limit // self.page_size * 17 // 16 + 16) * self.page_size
        stretch.bin_set = bin_set
        stretch.tail = NO_CHUNK
        self.stretches.append(stretch)      # makes room in the list before there are addresses
        try:
            self.add_calls(1)
            stretch.ptr = call_reserve(self.source.sub_allocator, stretch.nbytes)
            self.take_in(stretch)
        except BaseException:
            self.stretches.remove(stretch)
            raise
        return stretch

    cdef int take_in(self, Stretch stretch) except -1:
        cdef cbool overlaps
        acquire_lock(self.lock[0])
        stretch.stream = self.pool.bin_sets[stretch.bin_set].lane.stream
        stretch.asked_of = stream_to_ask(&self.pool.bin_sets[stretch.bin_set].lane)
        overlaps = self.pool.overlaps_region(stretch.ptr, stretch.nbytes)
        if not overlaps and self.pages.open_window(stretch.bin_set, stretch.ptr):
            stretch.tail = add_range(self.pool, stretch.ptr, stretch.nbytes, stretch.bin_set)
            stretch.is_known = stretch.tail != NO_HOST_MEMORY
            if not stretch.is_known:
                self.pages.close_window(stretch.bin_set)
        self.lock.release()
        if overlaps:        # and they are not ours to give back
            raise SubAllocatorError(f"{self.source.sub_allocator!r}.reserve returned {stretch.ptr:#x}, which is in use")
        if not stretch.is_known:
            self.give_addresses_up(stretch.ptr, stretch.nbytes, None)
            raise out_of_host_memory()
        return 0

    cdef void give_addresses_up(self, uint64_t ptr, uint64_t nbytes, Faults faults) noexcept:
        """Gives a reservation back. If that fails, it is tried again the next time that memory is given back."""
        try:
            self.call_unreserve(ptr, nbytes)
        except BaseException as error:
            self.keep_stuck((), [], ptr, nbytes)
            if faults is not None:
                faults.add(error)

    cdef uint64_t page_ptr(self, uint32_t bin_set, uint64_t slot) noexcept:
        acquire_lock(self.lock[0])
        cdef uint64_t ptr = self.pool.bin_sets[bin_set].window.address_of(slot)
        self.lock.release()
        return ptr

    # -- new pages -----------------------------------------------------------------------------------------------------

    cdef uint64_t grow(self, Stretch stretch, uint64_t wanted, ChunkHandle at) except? 0xFFFFFFFFFFFFFFFF:
        """Makes pages and maps them into a range: at this unmapped chunk, or else (NO_CHUNK) at its end if they fit
        there. Returns how many: fewer where the sub-allocator has no memory for more."""
        cdef uint64_t set_aside = wanted * self.page_size
        acquire_lock(self.lock[0])
        self.source.set_aside += set_aside
        self.source.newest_call().nbytes += set_aside   # which a fork in one of these calls must not forget
        self.lock.release()
        try:
            self.create(wanted)
            wanted = len(self.fresh)
            while self.fresh:
                self.map_new(stretch, at)
        finally:
            self.release_fresh()
            acquire_lock(self.lock[0])
            self.source.set_aside -= set_aside
            self.source.newest_call().nbytes -= set_aside
            self.lock.release()
        return wanted

    cdef int create(self, uint64_t wanted) except -1:
        """Makes pages: as many as are wanted, or as there is memory for."""
        cdef Page page
        cdef uint64_t made = 0
        while <uint64_t>len(self.fresh) < wanted:
            self.fresh.append(Page())
        begun = time.perf_counter()
        try:
            for page in self.fresh:
                page.nbytes = self.page_size
                self.add_calls(1)
                page.number = call_create(self.source.sub_allocator, self.page_size)
                if page.number is None:
                    self.is_refused = True
                    self.source.refused_bytes.set(self.page_size)
                    break
                made += 1
        finally:
            self.calls.creates += made
            self.calls.seconds += time.perf_counter() - begun
            del self.fresh[made:]
        return 0

    cdef void release_fresh(self) noexcept:
        """Releases the pages that were made and could not be mapped."""
        cdef Page page
        while self.fresh:
            page = self.fresh.pop(0)
            if page.number is not None:
                self.calls.releases += 1
                self.release_page(page, None)

    cdef uint64_t map_new(self, Stretch stretch, ChunkHandle at) except? 0xFFFFFFFFFFFFFFFF:
        """Maps as many of the new pages as one row of addresses has room for."""
        cdef uint64_t ptr = 0, count = 0
        cdef ChunkHandle handle = self.begin(stretch, len(self.fresh), at, &ptr, &count)
        cdef list mapped
        cdef cbool done
        try:
            mapped = self.fresh[:count]
            self.enter_pages(stretch, ptr, mapped)
            del self.fresh[:count]
            self.put(ptr, driver_numbers(mapped))
            acquire_lock(self.lock[0])
            done = end_mapping(self.pool, handle)
            self.touched.nbytes = 0 if done else self.touched.nbytes
            self.lock.release()
            if not done:
                self.call_unmap(ptr, count * self.page_size)
                raise out_of_host_memory()
        except BaseException as error:
            self.give_up(stretch, handle, ptr, count, getattr(error, "lost", ()))
            self.touched.nbytes = 0
            raise
        self.note_change()
        return count

    cdef ChunkHandle begin(self, Stretch stretch, uint64_t wanted, ChunkHandle at, uint64_t* ptr,
                           uint64_t* count) except? 0xFFFFFFFE:
        """Takes unmapped addresses: at the end of a range, or else where it has a hole, and then perhaps fewer. There
        are some, since each page is mapped into a range once at most."""
        cdef ChunkHandle handle
        cdef Chunk* chunk
        cdef cbool begun = False
        acquire_lock(self.lock[0])
        handle = at if at != NO_CHUNK else stretch.tail
        if handle == NO_CHUNK or self.pool.chunks[handle].size < wanted * self.page_size:
            handle = self.first_hole(stretch)
        if handle != NO_CHUNK:
            chunk = &self.pool.chunks[handle]
            ptr[0] = chunk.ptr
            count[0] = min(wanted, chunk.size // self.page_size)
            begun = self.pool.bin_sets[stretch.bin_set].window.make_room(ptr[0] + count[0] * self.page_size)
            begun = begun and begin_mapping(self.pool, handle, count[0] * self.page_size)
            if begun and handle == stretch.tail:
                stretch.tail = self.pool.chunks[handle].next
        self.lock.release()
        if handle == NO_CHUNK:
            raise SubAllocatorError(f"no addresses are left for stream {stretch.stream}, as some could not be "
                                    f"unmapped: release_free_regions() tries that again")
        if not begun:
            raise out_of_host_memory()
        return handle

    cdef ChunkHandle first_hole(self, Stretch stretch) noexcept:
        """The first unmapped chunk of a range, or NO_CHUNK. Needs the lock."""
        cdef ChunkHandle handle = self.pool.regions[stretch.ptr + stretch.nbytes].first
        while handle != NO_CHUNK and self.pool.chunks[handle].state != UNMAPPED:
            handle = self.pool.chunks[handle].next
        return handle

    cdef int enter_pages(self, Stretch stretch, uint64_t ptr, list pages) except -1:
        """Enters pages that are to be mapped: all, or none."""
        cdef Window* window
        cdef uint32_t number = NO_PAGE
        cdef uint64_t first
        cdef Py_ssize_t entered = 0, count = len(pages)
        cdef cbool done
        self.made.extend([None] * max(0, <Py_ssize_t>self.pages.count + count - len(self.made)))
        acquire_lock(self.lock[0])
        window = self.pool.bin_sets[stretch.bin_set].window
        first = window.slot_at(ptr)
        while entered < count:
            number = self.pages.enter_page(stretch.bin_set, <uint32_t>(first + entered))
            if number == NO_PAGE:
                break
            self.made[number] = pages[entered]
            entered += 1
        done = entered == count
        while entered > 0 and not done:
            entered -= 1
            number = window.page_at(first + entered)
            self.pages.forget_page(number)
            self.made[number] = None
        self.lock.release()
        if not done:
            raise out_of_host_memory()
        return 0

    cdef list numbers_of(self, list pages):
        """The sub-allocator's numbers of pages."""
        cdef list numbers = []
        cdef uint32_t page
        for page in pages:
            numbers.append((<Page>self.made[page]).number)
        return numbers

    cdef int put(self, uint64_t ptr, list numbers) except -1:
        """Maps pages and lets the device use them: all, or none. If that fails, what stayed mapped is the error's
        `lost`. Whoever enters what came of it in the books sets `touched` back."""
        cdef object sub_allocator = self.source.sub_allocator
        cdef uint64_t nbytes = len(numbers) * self.page_size
        begun = time.perf_counter()
        self.touched = Place(ptr, nbytes)
        try:
            self.add_calls(len(numbers))
            sub_allocator.map(ptr, numbers)
            self.calls.maps += len(numbers)
            try:
                self.calls.set_accesses += 1
                self.add_calls(1)
                sub_allocator.set_access(ptr, nbytes)
            except BaseException as error:
                try:
                    self.call_unmap(ptr, nbytes)
                except BaseException:
                    if not isinstance(error, SubAllocatorError):
                        error = SubAllocatorError(f"{sub_allocator!r}.set_access failed with {error!r}")
                    error.lost = ((ptr, nbytes),)
                raise error
        finally:
            self.calls.seconds += time.perf_counter() - begun
        return 0

    cdef void give_up(self, Stretch stretch, ChunkHandle handle, uint64_t ptr, uint64_t count, lost) noexcept:
        """Takes a mapping that failed out of the books. What is lost stays, and is to be unmapped later."""
        cdef Window* window
        cdef uint64_t i
        cdef uint32_t page
        cdef bint is_mapped, some = False
        for i in range(count):
            is_mapped = lies_in(ptr + i * self.page_size, lost)
            some = some or is_mapped
            acquire_lock(self.lock[0])
            window = self.pool.bin_sets[stretch.bin_set].window
            page = window.page_at(window.slot_at(ptr) + i)
            self.lock.release()
            if page != NO_PAGE and not is_mapped:
                self.drop_page(page, None)
        acquire_lock(self.lock[0])
        cancel_mapping(self.pool, handle, some)
        self.find_tail(stretch)
        self.lock.release()
        if some:
            self.settle(stretch, handle)

    cdef void drop_page(self, uint32_t number, Faults faults) noexcept:
        """Releases a page that has been unmapped."""
        cdef Page page = self.made[number]
        self.made[number] = None
        acquire_lock(self.lock[0])
        self.pages.forget_page(number)
        self.lock.release()
        self.calls.releases += 1
        self.is_refused = False
        self.release_page(page, faults)

    cdef void settle(self, Stretch stretch, ChunkHandle handle) noexcept:
        """Tells the pool which slots of a leaving chunk have gone."""
        cdef Window* window
        cdef Chunk* chunk
        cdef size_t slot, count, end
        cdef cbool has_gone
        acquire_lock(self.lock[0])
        window = self.pool.bin_sets[stretch.bin_set].window
        while handle < NO_HOST_MEMORY:
            chunk = &self.pool.chunks[handle]
            slot = window.slot_at(chunk.ptr)
            end = window.slot_at(chunk.ptr + chunk.size)
            has_gone = window.page_at(slot) == NO_PAGE
            count = 1
            while slot + count < end and (window.page_at(slot + count) == NO_PAGE) == has_gone:
                count += 1
            handle = end_unmapping(self.pool, handle, count * self.page_size, has_gone)
            stretch.some_stuck = stretch.some_stuck or not has_gone or handle == NO_HOST_MEMORY
        self.find_tail(stretch)
        self.lock.release()
        self.note_change()

    cdef void find_tail(self, Stretch stretch) noexcept:
        """Looks up the unmapped chunk at the end of a range. Needs the lock."""
        cdef ChunkHandle last = self.pool.chunk_at_end(&self.pool.regions[stretch.ptr + stretch.nbytes])
        stretch.tail = last if self.pool.chunks[last].state == UNMAPPED else <ChunkHandle>NO_CHUNK

    cdef void let_held_go(self) noexcept:
        acquire_lock(self.lock[0])
        self.pages.let_go(self.held)
        self.lock.release()

    # -- views that go -------------------------------------------------------------------------------------------------

    cdef void keep_stuck(self, lost, list pages, uint64_t ptr, uint64_t nbytes) noexcept:
        """Notes addresses at which pages stayed mapped. Once they are unmapped, the pages are released, and the
        reservation (0 bytes: there is none) is given back."""
        cdef Retired stuck
        cdef uint32_t page
        try:
            stuck = Retired()
            stuck.ptr = ptr
            stuck.nbytes = nbytes
            stuck.mapped = list(lost)
            stuck.pages = list(pages)
            stuck.is_stuck = True
            self.retired.append(stuck)
        except MemoryError:
            pass        # it is not known any more where they are, and the pages below are kept for good
        acquire_lock(self.lock[0])
        for page in pages:
            self.pages.records[page].views += 1
        self.lock.release()

    cdef bint retire(self, uint32_t number) except -1:
        """Takes a kept view out of use, to be unmapped once its stream has finished with it. False: its stream cannot
        be asked, as while it is captured, and the view stays; or another thread has taken it."""
        cdef Retired retired = Retired()
        cdef View* view
        cdef Place place
        cdef list pages = [], mapped
        cdef cbool is_kept
        retired.pages = []
        retired.mapped = []
        acquire_lock(self.lock[0])
        view = &self.pages.views.at(number)
        retired.stream = stream_to_ask(&self.pool.bin_sets[view.runs[0].set].lane)     # a view's own says IN_RANGES
        place = Place(view.address, view.pages * self.page_size)
        self.lock.release()
        self.list_pages(number, pages)
        mapped = [(place.ptr, place.nbytes)]
        if self.source.sub_allocator.asynchronous:
            try:
                retired.fence = self.source.sub_allocator.fence(retired.stream)
            except Exception:
                return False
        self.retired.append(retired)
        acquire_lock(self.lock[0])
        is_kept = self.pages.views.at(number).state == KEPT
        if is_kept:         # only now, so that a fork finds it either kept or retired
            self.pages.retire_view(number)
            retired.ptr, retired.nbytes = place.ptr, place.nbytes
            retired.pages, retired.mapped = pages, mapped
        self.lock.release()
        if not is_kept:
            self.retired.pop()
        return is_kept

    cdef int list_pages(self, uint32_t number, list pages) except -1:
        """The numbers of a view's pages. Only the thread that maps changes what is read here."""
        cdef vector[uint32_t] found
        cdef uint32_t page
        cdef View* view = &self.pages.views.at(number)
        cdef Run* run
        cdef size_t i, k
        found.reserve(view.pages)
        acquire_lock(self.lock[0])
        for k in range(view.runs.size()):   # a loop over the vector itself would copy it
            run = &view.runs[k]
            for i in range(run.count):
                found.push_back(self.pool.bin_sets[run.set].window.page_at(run.first + i))
        self.lock.release()
        for page in found:
            pages.append(page)
        return 0

    cdef int sweep(self, Faults faults, bint wait, bint again) except -1:
        """Unmaps the retired views that no queued work uses any more. `wait`: waits for that work. `again`: also tries
        what the sub-allocator failed to unmap before. Its errors go to `faults`, and what it failed on is left to the
        next try."""
        cdef Retired retired
        cdef Py_ssize_t i = len(self.retired)
        while i > 0:
            i -= 1
            retired = self.retired[i]
            if retired.is_stuck and not again:
                continue
            try:
                if retired.fence is not None and wait:
                    retired.fence.wait()
                if retired.fence is not None and not retired.fence.done():
                    continue
                self.unmap_retired(retired)
            except BaseException as error:
                retired.is_stuck = True
                if faults is None and not isinstance(error, Exception):
                    raise
                if faults is not None:
                    faults.add(error)
            else:
                del self.retired[i]
        return 0

    cdef int unmap_retired(self, Retired retired) except -1:
        cdef uint32_t page
        while retired.mapped:
            ptr, nbytes = retired.mapped[0]
            self.call_unmap(ptr, nbytes)
            del retired.mapped[0]
            self.touched.nbytes = 0
        acquire_lock(self.lock[0])
        for page in retired.pages:
            self.pages.records[page].views -= 1
        del retired.pages[:]
        self.lock.release()
        if retired.nbytes:
            self.call_unreserve(retired.ptr, retired.nbytes)
        return 0

    cdef int call_unmap(self, uint64_t ptr, uint64_t nbytes) except -1:
        """Whoever enters in the books that nothing is mapped there any more sets `touched` back."""
        cdef Place before = self.touched
        begun = time.perf_counter()
        self.calls.unmaps += 1
        self.touched = Place(ptr, nbytes)
        try:
            self.add_calls(1)
            self.source.sub_allocator.unmap(ptr, nbytes)
        except BaseException:
            self.touched = before       # that of a `put` which failed
            raise
        finally:
            self.calls.seconds += time.perf_counter() - begun
        return 0

    # -- giving back ---------------------------------------------------------------------------------------------------

    cdef uint64_t trim(self, uint64_t keep, bint wait, Faults faults) except? 0xFFFFFFFFFFFFFFFF:
        """Releases free pages until no more than so many bytes are left: first those that have one address. Returns
        the bytes."""
        cdef uint64_t before = self.pages.count, kept = self.pages.pages_for(keep)
        cdef dict idle = {}
        cdef Stretch stretch
        cdef bint views_too
        self.try_unreleased_again(faults)
        for views_too in (False, True):
            if views_too and self.pages.count > kept:
                self.retire_all()
            self.sweep(faults, wait, True)
            for stretch in self.stretches:
                if not stretch.is_known or self.is_set_asleep(stretch.bin_set):
                    continue
                if stretch.some_stuck and self.is_idle(stretch.asked_of, wait, idle, faults):
                    self.unmap_stuck(stretch, faults)
                if self.pages.count > kept and self.is_idle(stretch.asked_of, wait, idle, faults):
                    self.trim_stretch(stretch, self.pages.count - kept, views_too, faults)
        return (before - self.pages.count) * self.page_size

    cdef int retire_all(self) except -1:
        cdef uint32_t number = 0
        cdef cbool is_kept
        while True:
            acquire_lock(self.lock[0])
            is_kept = False
            while number < self.pages.views.count() and not is_kept:
                is_kept = self.pages.is_kept(number)
                number += not is_kept
            self.lock.release()
            if not is_kept:
                return 0
            self.retire(number)
            number += 1

    cdef bint is_idle(self, uint64_t stream, bint wait, dict idle, Faults faults) noexcept:
        """Whether a stream has finished with what was queued until now."""
        if stream in idle:
            return idle[stream]
        try:
            if wait:
                self.source.sub_allocator.wait(stream)
                idle[stream] = True
            else:
                fence = self.source.sub_allocator.fence(stream) if self.source.sub_allocator.asynchronous else None
                idle[stream] = fence is None or fence.done()
        except BaseException as error:
            faults.add(error)
            return False
        return idle[stream]

    cdef int trim_stretch(self, Stretch stretch, uint64_t most, bint views_too, Faults faults) except -1:
        cdef Run run
        acquire_lock(self.lock[0])
        self.pages.hold_unshared(stretch.bin_set, most, views_too, self.held)
        self.lock.release()
        self.is_unmapping = True
        try:
            while self.held.size():
                run = self.held.back()
                self.unmap_further_slots(&run, faults)
                self.unmap_run(stretch, &run, faults)
                self.held.pop_back()
        finally:
            self.is_unmapping = False
        return 0

    cdef int unmap_further_slots(self, Run* run, Faults faults) except -1:
        """Unmaps the pages of a run wherever else they are mapped in ranges."""
        cdef uint64_t i
        cdef uint32_t page, k, number_of_slots
        cdef Slot slot
        for i in range(run.count):
            acquire_lock(self.lock[0])
            page = self.pool.bin_sets[run.set].window.page_at(run.first + i)
            self.lock.release()
            k = 0
            while True:
                acquire_lock(self.lock[0])
                number_of_slots = <uint32_t>self.pages.records[page].slots.size()
                if k < number_of_slots:
                    slot = self.pages.records[page].slots[k]
                self.lock.release()
                if k >= number_of_slots:
                    break
                if slot.set == run.set or not self.unmap_slot(page, slot, faults):
                    k += 1
        return 0

    cdef bint unmap_slot(self, uint32_t page, Slot slot, Faults faults) noexcept:
        """Takes one of its further slots from a page. False: that failed."""
        cdef Run run = Run(slot.set, slot.number, 1)
        cdef Stretch stretch
        try:
            self.call_unmap(self.page_ptr(slot.set, slot.number), self.page_size)
        except BaseException as error:
            faults.add(error)
            return False
        acquire_lock(self.lock[0])
        self.pages.records[page].drop(self.pages.records[page].in_set(slot.set))
        self.pool.bin_sets[slot.set].window.set_page(slot.number, NO_PAGE)
        forget_absent(self.pool, self.pages.chunk_of(&run))
        self.touched.nbytes = 0
        for stretch in self.stretches:
            if stretch.bin_set == slot.set and stretch.is_known:
                self.find_tail(stretch)
        self.lock.release()
        return True

    cdef int unmap_run(self, Stretch stretch, Run* run, Faults faults) except -1:
        """Unmaps held slots and releases their pages. What cannot be unmapped is left, to be tried again."""
        cdef Window* window
        cdef uint64_t i, ptr = self.page_ptr(run.set, run.first)
        cdef uint32_t page
        cdef ChunkHandle handle
        cdef bint only_here = True
        acquire_lock(self.lock[0])
        window = self.pool.bin_sets[run.set].window
        handle = self.pages.chunk_of(run)
        for i in range(run.count):
            only_here = only_here and self.pages.records[window.page_at(run.first + i)].slots.size() == 1
        self.lock.release()
        try:
            if not only_here:
                raise SubAllocatorError(f"pages at {ptr:#x} are mapped elsewhere, too")
            self.call_unmap(ptr, run.count * self.page_size)
        except BaseException as error:
            faults.add(error)
        else:
            for i in range(run.count):
                acquire_lock(self.lock[0])
                window = self.pool.bin_sets[run.set].window
                page = window.page_at(run.first + i)
                self.lock.release()
                self.drop_page(page, faults)
            self.touched.nbytes = 0
        self.settle(stretch, handle)
        return 0

    cdef int unmap_stuck(self, Stretch stretch, Faults faults) except -1:
        """Tries again to unmap what should have left a range."""
        cdef ChunkHandle handle
        cdef Run run
        cdef Window* window
        cdef uint64_t behind = stretch.ptr
        stretch.some_stuck = False
        while True:
            acquire_lock(self.lock[0])
            window = self.pool.bin_sets[stretch.bin_set].window
            handle = self.pool.regions[stretch.ptr + stretch.nbytes].first
            while handle != NO_CHUNK and (self.pool.chunks[handle].ptr < behind
                                          or self.pool.chunks[handle].state != LEAVING):
                handle = self.pool.chunks[handle].next
            if handle != NO_CHUNK:
                run = Run(stretch.bin_set, <uint32_t>window.slot_at(self.pool.chunks[handle].ptr),
                          <uint32_t>(self.pool.chunks[handle].size // self.page_size))
                window.note_chunk(run.first, handle)
            self.lock.release()
            if handle == NO_CHUNK:
                return 0
            behind = window.address_of(run.first + run.count)
            if self.has_gone_in_part(&run):     # a thread stopped for ever while it released the pages
                self.settle(stretch, handle)    # and what is left of the chunk is for the next call
                stretch.some_stuck = True
                continue
            self.unmap_further_slots(&run, faults)
            self.unmap_run(stretch, &run, faults)

    cdef bint has_gone_in_part(self, Run* run) noexcept:
        cdef uint64_t i
        cdef bint some = False
        acquire_lock(self.lock[0])
        for i in range(run.count):
            some = some or self.pool.bin_sets[run.set].window.page_at(run.first + i) == NO_PAGE
        self.lock.release()
        return some

    # -- the end -------------------------------------------------------------------------------------------------------

    cdef size_t count_what_is_mapped(self) noexcept:
        return len(self.stretches) + len(self.retired) + (self.unreleased is not None)

    cdef void close(self, Faults faults) noexcept:
        cdef Stretch stretch
        cdef Py_ssize_t i
        self.let_held_go()
        self.forget_chunks()
        self.try_unreleased_again(faults)
        for stretch in self.stretches:
            if self.count_mapped(stretch) == 0:
                continue    # and its stream may be gone
            try:
                self.source.sub_allocator.wait(stretch.asked_of)
            except BaseException as error:      # even if the device fails, its memory is given back
                faults.add(error)
        self.close_views(faults)
        i = len(self.stretches)
        while i > 0:
            i -= 1
            stretch = self.stretches[i]
            self.empty(stretch, faults)
            if self.give_addresses_back(stretch, faults):
                del self.stretches[i]

    cdef void forget_chunks(self) noexcept:
        """Takes all ranges and views out of the pool."""
        cdef Stretch stretch
        cdef View* view
        cdef uint32_t number
        acquire_lock(self.lock[0])
        for number in range(self.pages.views.count()):
            view = &self.pages.views.at(number)
            if view.state in (KEPT, LIVE):
                remove_range(self.pool, view.address, view.pages * self.page_size)
                self.pages.views.retire(number)
        for stretch in self.stretches:
            if stretch.is_known:
                remove_range(self.pool, stretch.ptr, stretch.nbytes)
                stretch.is_known = False
        self.lock.release()

    cdef void close_views(self, Faults faults) noexcept:
        cdef View* view
        cdef uint32_t number
        cdef uint64_t ptr, nbytes
        try:
            self.sweep(faults, True, True)
        except BaseException as error:
            faults.add(error)
        for number in range(self.pages.views.count()):
            view = &self.pages.views.at(number)
            if view.state != RETIRED:
                continue
            ptr, nbytes = view.address, view.pages * self.page_size
            try:
                self.call_unmap(ptr, nbytes)
                acquire_lock(self.lock[0])
                self.pages.forget_view(number)
                self.touched.nbytes = 0
                self.lock.release()
                self.give_addresses_up(ptr, nbytes, faults)
            except BaseException as error:
                faults.add(error)

    cdef void empty(self, Stretch stretch, Faults faults) noexcept:
        """Unmaps what is mapped in a range, in runs as long as they can be, but for pages that views still have."""
        cdef Window* window = self.pool.bin_sets[stretch.bin_set].window
        cdef uint64_t slot = 0, count, i
        if window == NULL:
            return
        while slot < window.slots():
            count = 0
            while slot + count < window.slots() and self.may_be_unmapped(window.page_at(slot + count)):
                count += 1
            if count:
                try:
                    self.call_unmap(window.address_of(slot), count * self.page_size)
                    for i in range(slot, slot + count):
                        self.drop_slot(stretch.bin_set, i, faults)
                    self.touched.nbytes = 0
                except BaseException as error:
                    faults.add(error)
            slot += count + 1

    cdef bint may_be_unmapped(self, uint32_t page) noexcept:
        return page != NO_PAGE and self.pages.records[page].views == 0

    cdef void drop_slot(self, uint32_t bin_set, uint64_t slot, Faults faults) noexcept:
        """Takes a slot from its page, and releases the page if that was its last."""
        cdef uint32_t page
        cdef cbool is_mapped
        acquire_lock(self.lock[0])
        page = self.pool.bin_sets[bin_set].window.page_at(slot)
        self.pool.bin_sets[bin_set].window.set_page(slot, NO_PAGE)
        self.pages.records[page].drop(self.pages.records[page].in_set(bin_set))
        is_mapped = self.pages.records[page].is_mapped()
        self.lock.release()
        if not is_mapped:
            self.drop_page(page, faults)

    cdef bint give_addresses_back(self, Stretch stretch, Faults faults) noexcept:
        """Gives the addresses of a range back if nothing is mapped there. Returns whether they went."""
        cdef Window* window = self.pool.bin_sets[stretch.bin_set].window
        cdef uint64_t slot
        for slot in range(window.slots() if window != NULL else 0):
            if window.page_at(slot) != NO_PAGE:
                return False
        acquire_lock(self.lock[0])
        self.pages.close_window(stretch.bin_set)
        self.lock.release()
        try:
            self.call_unreserve(stretch.ptr, stretch.nbytes)
        except BaseException as error:
            faults.add(error)
            return False
        return True

    cdef uint64_t count_mapped(self, Stretch stretch) noexcept:
        """How many pages are mapped into a range. Only the thread that maps changes that."""
        cdef Window* window = self.pool.bin_sets[stretch.bin_set].window
        cdef uint64_t slot, count = 0
        for slot in range(window.slots() if window != NULL else 0):
            count += window.page_at(slot) != NO_PAGE
        return count

    cdef dict stats(self):
        """How much there is of everything, and what was called so far: for `page_stats`."""
        cdef uint64_t pages, free_pages = 0, views = 0, slots, lost = 0
        cdef uint32_t number
        cdef Stretch stretch
        cdef Retired retired
        cdef ChunkHandle handle
        acquire_lock(self.lock[0])
        pages, slots = self.pages.count, self.pages.views.slots()
        for stretch in self.stretches:
            if not stretch.is_known:    # what is still mapped after close()
                lost += self.count_mapped(stretch)
                continue
            free_pages += self.pages.count_free(stretch.bin_set)
            handle = self.pool.regions[stretch.ptr + stretch.nbytes].first if stretch.some_stuck else NO_CHUNK
            while handle != NO_CHUNK:
                if self.pool.chunks[handle].state == LEAVING:
                    lost += self.pool.chunks[handle].size // self.page_size
                handle = self.pool.chunks[handle].next
        for number in range(self.pages.views.count()):
            views += self.pages.views.at(number).state in (KEPT, LIVE)
        for number in range(<uint32_t>self.pages.records.size()):
            slots += self.pages.records[number].slots.size()
        self.lock.release()
        for retired in list(self.retired):
            slots += len(retired.pages)
            lost += len(retired.pages) if retired.is_stuck else 0
        return {
            "page_size": self.page_size, "pages": pages + self.unreleased_bytes() // self.page_size,
            "pages_owned": pages - free_pages, "views": views,
            "slots_mapped": slots, "stitches": self.calls.stitches, "creates": self.calls.creates,
            "maps": self.calls.maps, "set_accesses": self.calls.set_accesses, "unmaps": self.calls.unmaps,
            "releases": self.calls.releases, "stream_waits": self.calls.stream_waits,
            "most_calls_of_a_request": self.calls.most, "lost_slots": lost, "driver_seconds": self.calls.seconds,
        }
