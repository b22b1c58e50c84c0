"""The books of a sub-allocator that maps memory: its reservations, its pages, and where they are mapped. This code maps
nothing itself: it checks what may be done, and records what was done.

The books themselves are C++ (native/mapping_books.hpp), for calls without the GIL. Here are their methods for
sub-allocators in Python. The caller must hold a lock. Each change is made completely or not at all, even if the host
has no memory for it.
"""

from cython.operator cimport dereference as deref, preincrement
from libc.stdint cimport uint64_t
from libcpp.map cimport map as cmap
from libcpp.memory cimport make_shared, shared_ptr
from libcpp.vector cimport vector

from bfc.native.mapping_books cimport (
    MAPPED_ALREADY, MappedPage, MappingRun, NO_HOST_MEMORY, NO_PAGES, NO_RESERVATION, NO_RUN, NOT_RESERVED,
    NativeMapping, NativeReservation, ODD_ADDRESS, ODD_SIZE, PAST_END, STILL_MAPPED, TakenPage, TakenReservation,
    UNKNOWN_PAGE,
)

from bfc.errors import SubAllocatorError, out_of_host_memory


cdef int refuse(int why, str call, uint64_t address, uint64_t nbytes, uint64_t where, uint64_t granularity) except -1:
    """Raises the error for what the books refuse. 0: nothing."""
    if why == 0:
        return 0
    if why == NO_HOST_MEMORY:
        raise out_of_host_memory()
    raise SubAllocatorError({
        ODD_SIZE: f"{call}({nbytes}): the size must be a positive multiple of {granularity}",
        NO_RESERVATION: f"unreserve({address:#x}, {nbytes}) is not a whole reservation",
        STILL_MAPPED: f"unreserve({address:#x}, {nbytes}): memory is mapped there, the first at {where:#x}: unmap it "
                      f"first",
        UNKNOWN_PAGE: f"{f'map({address:#x})' if call == 'map' else f'release({where})'}: there is no "
                      f"{f'page {where}' if call == 'map' else 'such page'}, or it was released already",
        NO_PAGES: f"map({address:#x}) needs one page or more",
        NOT_RESERVED: f"map({address:#x}): that address is not reserved",
        ODD_ADDRESS: f"map({address:#x}): the address must be a multiple of {granularity}",
        PAST_END: f"map({address:#x}): {nbytes} bytes of pages pass the end of the reservation, {where:#x}",
        MAPPED_ALREADY: f"map({address:#x}): a page is mapped at {where:#x} already: unmap it first",
        NO_RUN: f"{call}({address:#x}, {nbytes}): these are not whole pages that are mapped end to end",
    }[why])


cdef shared_ptr[MappedPage] no_page = make_shared[MappedPage](0, 0)     # what a Page is that nothing made


cdef class Page:
    """A piece of memory. It lives until it is released and mapped nowhere."""

    cdef shared_ptr[MappedPage] page

    def __cinit__(self):
        self.page = no_page

    @property
    def number(self):
        return deref(self.page).number

    @property
    def nbytes(self):
        return deref(self.page).nbytes

    @property
    def mappings(self):
        """How often it is mapped."""
        return deref(self.page).mappings

    @property
    def is_gone(self):
        """Whether it is released and mapped nowhere."""
        return deref(self.page).is_gone()


cdef Page page_of(shared_ptr[MappedPage]& page):
    cdef Page made = Page.__new__(Page)
    made.page = page
    return made


cdef class Mapping:
    """A page at an address."""

    cdef readonly uint64_t start
    cdef readonly Page page
    cdef readonly uint64_t end
    cdef readonly bint has_access       # whether `set_access` was called


cdef class Run:
    """Mappings that lie end to end in one reservation: there, to be made, or removed."""

    cdef MappingRun run

    @property
    def start(self):
        return self.run.start()

    @property
    def nbytes(self):
        return self.run.nbytes()

    @property
    def mappings(self):
        cdef list found = []
        cdef Mapping mapping
        cdef size_t i
        for i in range(self.run.mappings.size()):
            mapping = Mapping()
            mapping.start = self.run.mappings[i].start
            mapping.end = self.run.mappings[i].end()
            mapping.page = page_of(self.run.mappings[i].page)
            mapping.has_access = self.run.mappings[i].has_access
            found.append(mapping)
        return found


cdef class MappingBooks:
    """Reservations, pages and mappings of one sub-allocator, whose sizes and addresses must be multiples of
    `granularity`."""

    def __init__(self, uint64_t granularity):
        self.native.granularity = granularity

    @property
    def granularity(self):
        return self.native.granularity

    @property
    def page_bytes(self):
        """The bytes of all pages that are not released, or still mapped."""
        return self.native.page_bytes

    @property
    def pages(self):
        """The pages that are not released, by number."""
        return {each.first: page_of(each.second) for each in self.native.pages}

    @property
    def reservations(self):
        """The bytes of the reservations, by first address."""
        cdef cmap[uint64_t, NativeReservation].iterator each = self.native.reservations.begin()
        cdef dict found = {}
        while each != self.native.reservations.end():   # a `for` would copy each with its mappings, and memory may lack
            found[deref(each).first] = deref(each).second.nbytes
            preincrement(each)
        return found

    @property
    def reserved_bytes(self):
        """The bytes of all reservations."""
        return sum(self.reservations.values())

    def check_size(self, nbytes, str call):
        """Refuses a size that is not a multiple of the granularity."""
        if nbytes <= 0 or nbytes % self.native.granularity:
            raise SubAllocatorError(f"{call}({nbytes}): the size must be a positive multiple of "
                                    f"{self.native.granularity}")

    cdef int check(self, int why, str call, uint64_t address, uint64_t nbytes) except -1:
        return refuse(why, call, address, nbytes, self.native.where, self.native.granularity)

    # -- addresses -----------------------------------------------------------------------------------------------------

    def reserved(self, uint64_t address, uint64_t nbytes):
        self.check(self.native.reserved(address, nbytes), "reserve", address, nbytes)

    def check_unreserve(self, uint64_t address, uint64_t nbytes):
        self.check(self.native.may_unreserve(address, nbytes), "unreserve", address, nbytes)

    def unreserved(self, uint64_t address):
        """Removes a reservation. One that was removed already is no error."""
        cdef TakenReservation taken
        self.native.take_reservation(address, taken)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def created(self, uint64_t number, uint64_t nbytes):
        self.check(self.native.created(number, nbytes), "create", 0, nbytes)

    def page(self, number):
        """A page that is not released, or None."""
        cdef shared_ptr[MappedPage] found
        if 0 <= number < 2**64:
            found = self.native.held(number)
        return page_of(found) if found.get() != NULL else None

    def check_release(self, number):
        page = self.page(number)
        if page is None:
            raise SubAllocatorError(f"release({number}): there is no such page, or it was released already")
        return page

    def released(self, Page page not None):
        """Removes a page, which may still be mapped."""
        cdef TakenPage taken
        self.native.take_page(deref(page.page).number, taken)

    # -- mappings ------------------------------------------------------------------------------------------------------

    def plan_map(self, uint64_t address, numbers):
        """Checks what `map` was asked for, and returns it. Nothing changes."""
        cdef vector[uint64_t] wanted
        cdef Run run = Run()
        for number in numbers:
            if self.page(number) is None:
                raise SubAllocatorError(f"map({address:#x}): there is no page {number!r}, or it was released already")
            wanted.push_back(number)
        cdef int why = self.native.plan_map(address, wanted.data(), wanted.size(), &run.run)
        self.check(why, "map", address, 0 if run.run.mappings.empty() else run.run.nbytes())
        return run

    def mapped(self, Run run not None, count=None):
        """Records what `plan_map` has returned as mapped: the first `count` pages, or all."""
        cdef size_t pages = run.run.mappings.size() if count is None else min(<size_t>count, run.run.mappings.size())
        self.check(self.native.mapped(run.run, pages), "map", 0, 0)

    def find_run(self, uint64_t address, uint64_t nbytes, str call):
        """The mappings that begin at an address and have `nbytes` bytes. Nothing changes."""
        cdef Run run = Run()
        self.check(self.native.find_run(address, nbytes, &run.run), call, address, nbytes)
        return run

    def accessible(self, Run run not None):
        """Records that `set_access` was called. The run still says where it was called before."""
        self.native.accessible(run.run)

    def put_access_back(self, Run run not None):
        """Restores the access that a run had before `accessible`."""
        self.native.put_access_back(run.run)

    def unmapped(self, Run run not None):
        """Removes mappings. Returns the pages that are released, and mapped nowhere now."""
        cdef vector[shared_ptr[MappedPage]] leaving = run.run.leaving()
        cdef list gone = []
        cdef size_t i
        for i in range(leaving.size()):
            gone.append(page_of(leaving[i]))
        self.native.unmapped(run.run)
        return gone

    def restored(self, Run run not None):
        """Adds again what `unmapped` has removed."""
        self.check(self.native.mapped(run.run, run.run.mappings.size()), "map", 0, 0)

    def mappings(self):
        """(address, page number) of each mapping, in the order of addresses."""
        cdef cmap[uint64_t, NativeReservation].iterator each = self.native.reservations.begin()
        cdef NativeMapping* mapping
        cdef list found = []
        cdef size_t i
        while each != self.native.reservations.end():
            for i in range(deref(each).second.mappings.size()):
                mapping = &deref(each).second.mappings[i]
                found.append((mapping.start, deref(mapping.page).number))
            preincrement(each)
        return found

    def accessible_runs(self):
        """(address, bytes) of memory with access, in order; neighbours are joined."""
        cdef cmap[uint64_t, NativeReservation].iterator each = self.native.reservations.begin()
        cdef NativeMapping* mapping
        cdef list found = []
        cdef uint64_t begun, end
        cdef size_t i
        while each != self.native.reservations.end():
            begun = end = 0
            for i in range(deref(each).second.mappings.size()):
                mapping = &deref(each).second.mappings[i]
                if not mapping.has_access:
                    continue
                if mapping.start != end and end:
                    found.append((begun, end - begun))
                begun = mapping.start if mapping.start != end else begun
                end = mapping.end()
            if end:
                found.append((begun, end - begun))
            preincrement(each)
        return found


def still_mapped(error, undoing, lost):
    """The error of a `map` that could not be undone: the same error, with what is still mapped."""
    where = ", ".join(f"{nbytes} bytes at {address:#x}" for address, nbytes in lost)
    error.args = (f"{error}\n  undoing it failed, too: {undoing}\n  still mapped: {where}",)
    error.lost = tuple(lost)
    return error
