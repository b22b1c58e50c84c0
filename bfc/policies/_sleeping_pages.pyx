"""Stitched pages that sleep.

While a tag sleeps, the records of its pages stay: which slots and views name which page. Only the device's memory for
them is gone. Views that nothing lives in are forgotten beforehand; pages that become free meanwhile are forgotten
before their tag wakes.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from bfc._core cimport ABSENT, NO_CHUNK, NO_PAGE, UNMAPPED, Chunk, ChunkHandle, Window
from bfc.allocators._ranges cimport IS_GROWING, forget_absent
from bfc.allocators._pages cimport KEPT, LIVE, RETIRED, View
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._tags cimport Tag
from bfc.policies._mapper cimport Faults, Page, Place, lies_in
from bfc.policies._sleep cimport Nap, Run
from bfc.policies._page_mapper cimport Retired, Stretch
from bfc.policies._stitching cimport Stitching

from bfc.errors import SubAllocatorError

cdef extern from "window.hpp":
    pass


cdef int add_pages(Nap nap, Run run, set seen) except -1:
    """Adds a run to a nap, and those of its pages that are new to it."""
    cdef Page page
    nap.runs.append(run)
    for page in run.pages:
        if id(page) not in seen:
            seen.add(id(page))
            nap.pages.append(page)
    return 0


@cython.final
@cython.no_gc_clear
cdef class SleepingPages(Stitching):
    """Stitched pages; those of a tag can sleep."""

    def __cinit__(self):
        self.left = []

    cdef int list_mapped(self, Nap nap) except -1:
        cdef Run run
        cdef set seen = set()
        if nap.tag.is_asleep:
            for run in self.left:
                if run.tag == nap.tag.number:
                    add_pages(nap, run, seen)
            return 0
        self.retire_views_of(nap.tag.number)
        return self.list_runs(nap, True)

    cdef int list_needed(self, Nap nap) except -1:
        return self.list_runs(nap, False)

    cdef int retire_views_of(self, uint64_t tag) except -1:
        """Unmaps the views of a tag that nothing lives in."""
        cdef uint32_t number, set_of_views
        cdef Retired retired
        for number in range(self.pages.views.count()):
            acquire_lock(self.lock[0])
            set_of_views = self.pages.views.at(number).set
            is_kept = self.pages.views.at(number).state == KEPT
            self.lock.release()
            if is_kept and self.is_of_tag(set_of_views, tag):
                self.retire(number)
        self.sweep(None, True, True)
        for retired in self.retired:
            for page in retired.pages:
                if self.is_of_tag(self.pages.records[<uint32_t>page].slots[0].set, tag):
                    raise SubAllocatorError(f"{self.source.sub_allocator!r} failed to unmap memory that is not in use; "
                                            f"it is tried again by the next call")
        return 0

    cdef int list_runs(self, Nap nap, bint is_mapped) except -1:
        cdef Stretch stretch
        cdef Window* window
        cdef uint64_t slot, count
        cdef uint32_t number
        cdef Run run
        cdef set seen = set()
        for stretch in self.stretches:
            if not stretch.is_known or not self.is_of_tag(stretch.bin_set, nap.tag.number):
                continue
            window = self.pool.bin_sets[stretch.bin_set].window
            slot = 0
            while slot < window.slots():
                run = Run()
                run.pages = []
                run.ptr = window.address_of(slot)
                run.is_mapped = is_mapped
                count = slot
                while slot < window.slots() and window.page_at(slot) != NO_PAGE:
                    run.pages.append(self.made[window.page_at(slot)])
                    slot += 1
                run.nbytes = (slot - count) * self.page_size
                if run.nbytes:
                    add_pages(nap, run, seen)
                slot += 1
        for number in range(self.pages.views.count()):
            if self.pages.views.at(number).state == LIVE:
                self.add_view(nap, number, is_mapped, seen)
        return 0

    cdef int add_view(self, Nap nap, uint32_t number, bint is_mapped, set seen) except -1:
        cdef Run run = Run()
        cdef list numbers = []
        cdef uint32_t page
        acquire_lock(self.lock[0])
        run.ptr = self.pages.views.at(number).address
        run.nbytes = self.pages.views.at(number).pages * self.page_size
        run.tag = self.pages.views.at(number).set
        self.lock.release()
        if not self.is_of_tag(<uint32_t>run.tag, nap.tag.number):
            return 0
        self.list_pages(number, numbers)
        run.pages = []
        run.is_mapped = is_mapped
        for page in numbers:
            run.pages.append(self.made[page])
        return add_pages(nap, run, seen)

    cdef void note_runs(self, Nap nap) noexcept:
        cdef Run run
        cdef Py_ssize_t i = len(self.left)
        while i > 0:
            i -= 1
            if (<Run>self.left[i]).tag == nap.tag.number:
                del self.left[i]
        if nap.is_up:
            return
        for run in nap.runs:
            self.keep_left(nap, run)

    cdef void keep_left(self, Nap nap, Run run) noexcept:
        """Keeps the part of a run that stayed mapped, to be unmapped later."""
        cdef Run part
        cdef uint64_t first
        run.tag = nap.tag.number
        if run.is_mapped:
            self.left.append(run)
        elif run.lost is not None:
            for ptr, nbytes in run.lost:
                part = Run()
                part.ptr = ptr
                part.nbytes = nbytes
                part.tag = nap.tag.number
                part.is_mapped = True
                first = (part.ptr - run.ptr) // self.page_size
                part.pages = run.pages[first:first + part.nbytes // self.page_size]
                self.left.append(part)

    cdef void give_up_left(self, Faults faults) noexcept:
        cdef Run run
        cdef Page page
        cdef Py_ssize_t i = len(self.left)
        while i > 0:
            i -= 1
            run = self.left[i]
            try:
                if run.is_mapped:
                    self.call_unmap(run.ptr, run.nbytes)
                    run.note_unmapped()
                    self.touched.nbytes = 0
            except BaseException as error:
                faults.add(error)
        for run in self.left:
            for page in run.pages:
                page.is_mapped = page.is_mapped or run.is_mapped
        i = len(self.left)
        while i > 0:
            i -= 1
            run = self.left[i]
            for page in run.pages if not run.is_mapped else ():
                if page.number is not None and not page.is_mapped:
                    self.give_page_up(page)
            if not run.is_mapped:
                del self.left[i]

    cdef uint64_t bytes_held(self) noexcept:
        cdef Run run
        cdef set pages = set()
        for run in self.left:
            pages.update(map(id, run.pages))
        return len(pages) * self.page_size

    cdef uint64_t bytes_asleep(self) noexcept:
        cdef uint64_t found = 0
        cdef uint32_t i
        acquire_lock(self.lock[0])
        for i in range(<uint32_t>self.pool.bin_sets.size()):
            if self.pool.bin_sets[i].asleep:
                found += self.pool.bin_sets[i].mapped_bytes - self.pages.count_free(i) * self.page_size
        self.lock.release()
        return found

    cdef size_t count_what_is_mapped(self) noexcept:
        return Stitching.count_what_is_mapped(self) + len(self.left)

    # -- while a tag sleeps -------------------------------------------------------------------------------------------

    cdef void shrink(self, Tag tag) noexcept:
        cdef Stretch stretch
        cdef Faults faults = Faults()
        self.without_calls = True
        self.forget_views_of(tag.number)
        for stretch in self.stretches:
            if stretch.is_known and self.is_of_tag(stretch.bin_set, tag.number):
                self.shrink_stretch(stretch, faults)
        self.without_calls = False

    cdef void forget_views_of(self, uint64_t tag) noexcept:
        """Forgets the views of a sleeping tag that nothing lives in any more, and gives their addresses back."""
        cdef uint32_t number, page
        cdef uint64_t ptr, nbytes
        cdef list pages
        cdef Retired retired
        for number in range(self.pages.views.count()):
            if self.pages.views.at(number).state != KEPT or not self.is_of_tag(self.pages.views.at(number).set, tag):
                continue
            pages = []
            self.list_pages(number, pages)
            ptr, nbytes = self.pages.views.at(number).address, self.pages.views.at(number).pages * self.page_size
            retired = Retired()
            retired.ptr, retired.nbytes = ptr, nbytes
            retired.pages = []
            retired.mapped = []
            acquire_lock(self.lock[0])
            self.pages.retire_view(number)
            self.lock.release()
            for page in pages:
                self.pages.records[page].views -= 1
            try:
                self.call_unreserve(ptr, nbytes)
            except BaseException:
                self.retired.append(retired)    # only its addresses are left: the next sweep tries again

    cdef void shrink_stretch(self, Stretch stretch, Faults faults) noexcept:
        try:
            if stretch.some_stuck:
                self.unmap_stuck(stretch, faults)
            self.trim_stretch(stretch, self.pages.count, True, faults)
        except BaseException:
            pass    # the host is out of memory: then these pages wake with the rest

    # -- what is not called for memory that has gone ------------------------------------------------------------------

    cdef int call_unmap(self, uint64_t ptr, uint64_t nbytes) except -1:
        return 0 if self.without_calls else Stitching.call_unmap(self, ptr, nbytes)

    cdef void drop_page(self, uint32_t number, Faults faults) noexcept:
        cdef Page page = self.made[number]
        if self.without_calls and (page.number is None or page.is_mapped):
            self.made[number] = None    # if it is still mapped, it is released when its tag wakes
            acquire_lock(self.lock[0])
            self.pages.forget_page(number)
            self.lock.release()
        else:
            Stitching.drop_page(self, number, faults)

    cdef void close(self, Faults faults) noexcept:
        self.give_up_left(faults)
        Stitching.close(self, faults)

    cdef void close_views(self, Faults faults) noexcept:
        cdef uint32_t number
        cdef uint64_t ptr, nbytes
        for number in range(self.pages.views.count()):
            if self.pages.views.at(number).state == RETIRED and self.is_set_asleep(self.pages.views.at(number).set):
                ptr, nbytes = self.pages.views.at(number).address, self.pages.views.at(number).pages * self.page_size
                acquire_lock(self.lock[0])
                self.pages.forget_view(number)
                self.lock.release()
                self.give_addresses_up(ptr, nbytes, faults)
        Stitching.close_views(self, faults)

    cdef void empty(self, Stretch stretch, Faults faults) noexcept:
        self.without_calls = self.is_set_asleep(stretch.bin_set)
        Stitching.empty(self, stretch, faults)
        self.without_calls = False

    # -- a thread that is there no more --------------------------------------------------------------------------------

    cdef void take_over(self) noexcept:
        """Frees the pages that the stopped thread held, except those that it unmapped, and releases those that it had
        made."""
        cdef Stretch stretch
        cdef ChunkHandle handle
        cdef Chunk chunk
        cdef Py_ssize_t last
        self.without_calls = False
        self.end_calls_of_other(self.page_size)
        self.forget_what_has_gone()
        last = len(self.stretches) - 1
        self.release_fresh()
        if self.is_unmapping:       # what is held may be unmapped already: it stays LEAVING
            self.is_unmapping = False
            self.held.clear()
        self.let_held_go()
        for stretch in self.stretches:
            stretch.some_stuck = True
        if last >= 0 and (<Stretch>self.stretches[last]).ptr == 0:
            del self.stretches[last]        # the thread stopped while it reserved its addresses
        for stretch in self.stretches:
            handle = NO_CHUNK
            acquire_lock(self.lock[0])
            if stretch.is_known:
                handle = self.pool.regions[stretch.ptr + stretch.nbytes].first
            while handle != NO_CHUNK and not (self.pool.chunks[handle].state == UNMAPPED
                                              and self.pool.chunks[handle].freed_at_count == IS_GROWING):
                handle = self.pool.chunks[handle].next
            if handle != NO_CHUNK:
                chunk = self.pool.chunks[handle]
            self.lock.release()
            if handle != NO_CHUNK:
                self.give_up(stretch, handle, chunk.ptr, chunk.size // self.page_size, ())
        self.take_over_naps()

    cdef void forget_what_has_gone(self) noexcept:
        """Enters in the books what end_calls_of_other() has unmapped and unreserved."""
        cdef Stretch stretch
        cdef Run run
        cdef Place gone = self.going
        cdef Py_ssize_t i = len(self.stretches)
        for run in self.left:
            if self.touched.nbytes and run.ptr == self.touched.ptr:
                run.note_unmapped()
        self.forget_retired(gone)
        while i > 0:
            i -= 1
            stretch = self.stretches[i]
            if self.touched.nbytes and stretch.ptr <= self.touched.ptr < stretch.ptr + stretch.nbytes:
                self.empty_touched(stretch)
            if gone.nbytes and stretch.ptr == gone.ptr:
                del self.stretches[i]
        self.touched.nbytes = self.going.nbytes = 0

    cdef void forget_retired(self, Place gone) noexcept:
        """The same for views that were on their way out."""
        cdef Retired retired
        cdef View* view
        cdef uint32_t number
        cdef Py_ssize_t i = len(self.retired), k
        while i > 0:
            i -= 1
            retired = self.retired[i]
            k = len(retired.mapped)
            while k > 0:
                k -= 1
                if lies_in(retired.mapped[k][0], ((self.touched.ptr, self.touched.nbytes),)):
                    del retired.mapped[k]
            if gone.nbytes and retired.nbytes and retired.ptr == gone.ptr:
                del self.retired[i]
        for number in range(self.pages.views.count()):
            view = &self.pages.views.at(number)
            if view.state == RETIRED and self.touched.nbytes and view.address == self.touched.ptr:
                acquire_lock(self.lock[0])
                self.pages.forget_view(number)
                self.lock.release()
                self.keep_stuck((), [], self.touched.ptr, self.touched.nbytes)  # its addresses are left

    cdef void empty_touched(self, Stretch stretch) noexcept:
        """The same for a range."""
        cdef Window* window
        cdef uint64_t slot, end
        cdef ChunkHandle handle = NO_CHUNK
        acquire_lock(self.lock[0])
        window = self.pool.bin_sets[stretch.bin_set].window
        self.lock.release()
        if window == NULL or self.is_set_asleep(stretch.bin_set):     # the records of what sleeps stay
            return
        slot = window.slot_at(self.touched.ptr)
        end = slot + self.touched.nbytes // self.page_size
        while slot < end:
            if window.page_at(slot) != NO_PAGE:
                self.drop_slot(stretch.bin_set, slot, None)
            slot += 1
        acquire_lock(self.lock[0])
        if stretch.is_known:
            handle = self.pool.regions[stretch.ptr + stretch.nbytes].first
        while handle != NO_CHUNK and self.pool.chunks[handle].ptr != self.touched.ptr:
            handle = self.pool.chunks[handle].next
        if handle != NO_CHUNK and self.pool.chunks[handle].state == ABSENT:
            forget_absent(self.pool, handle)
            self.find_tail(stretch)
        self.lock.release()

    # -- what can be seen ---------------------------------------------------------------------------------------------

    cdef dict stats(self):
        cdef dict figures = Stitching.stats(self)
        cdef uint64_t asleep = 0, free = 0
        cdef Stretch stretch
        acquire_lock(self.lock[0])
        for stretch in self.stretches:
            if stretch.is_known and self.is_set_asleep(stretch.bin_set):
                asleep += self.pool.bin_sets[stretch.bin_set].mapped_bytes // self.page_size
                free += self.pages.count_free(stretch.bin_set)
        self.lock.release()
        figures["pages"] -= asleep
        figures["pages_owned"] -= asleep - free
        return figures
