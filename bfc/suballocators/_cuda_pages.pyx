"""Mapped memory of a CUDA device: the driver's calls, and the books that are kept of them.

The calls need no GIL. They are a table of C functions (include/bfc_mapping.h), which stands behind the methods of
`CUDASubAllocator`, too.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_assign
from bfc.native.mapping cimport BFC_NATIVE_MAPPING, bfc_mapping_fault, bfc_native_mapping
from bfc.native.mapping_books cimport (
    MappedPage, MappingRun, NO_HOST_MEMORY, ODD_SIZE, TakenPage, TakenReservation, UNKNOWN_PAGE,
)
from bfc.drivers.cuda._driver cimport Access, CUresult, SUCCESS, cu
from bfc.drivers.cuda._device cimport (
    CREATE, DeviceMemory, Lock, MAP, MappingCall, RELEASE, RESERVE, SET_ACCESS, UNMAP, UNRESERVE, VirtualMemory,
    access_of, mapping_error,
)
from bfc.suballocators._books cimport MappingBooks, refuse

from bfc.errors import SubAllocatorError
from bfc.suballocators._books import still_mapped

_CALLS = {
    RESERVE: "reserve", UNRESERVE: "unreserve", CREATE: "create", RELEASE: "release", MAP: "map",
    SET_ACCESS: "set_access", UNMAP: "unmap",
}


@cython.no_gc       # as NativeMapping
cdef class CUDAPages:
    """Reserved addresses and pages of one `CUDASubAllocator`, with its `handle_type`.

    A page's number is the driver's handle. The lock guards the books, and is never held while the driver is called.
    Meanwhile nobody else may use what is being mapped or unmapped.
    """

    cdef readonly VirtualMemory driver
    cdef readonly MappingBooks books
    cdef readonly tuple peers           # the other devices that have access to mapped memory, in order
    cdef Lock lock
    cdef int device
    cdef vector[Access] access          # of the device and its peers. Guarded by the lock
    cdef uint64_t access_changes        # counts how often that has changed
    cdef bfc_native_mapping table

    def __cinit__(self, DeviceMemory memory not None, str handle_type not None):
        self.driver = VirtualMemory(memory, handle_type)
        self.books = MappingBooks(self.driver.granularity)
        self.device = memory.ordinal
        self.peers = ()
        self.access.push_back(access_of(self.device, True))

    # -- what went wrong -----------------------------------------------------------------------------------------------

    cdef int failed(self, MappingCall call, int result, uint64_t address, uint64_t nbytes,
                    bfc_mapping_fault* fault) noexcept nogil:
        """Notes what a call has failed with: what the driver has answered, or why the books refuse it."""
        fault.call = call
        fault.result = result
        fault.address = address
        fault.nbytes = nbytes
        return result

    cdef int refused(self, MappingCall call, int why, uint64_t address, uint64_t nbytes,
                     bfc_mapping_fault* fault) noexcept nogil:
        """The same, for what the books refuse. Needs the lock, since it reads what that was about."""
        fault.lost = self.books.native.where
        return self.failed(call, why, address, nbytes, fault)

    cdef int raise_error(self, const bfc_mapping_fault* fault) except -1:
        if fault.result < 0:
            return refuse(fault.result, _CALLS[fault.call], fault.address, fault.nbytes, fault.lost,
                          self.books.native.granularity)
        error = mapping_error(fault.result, <MappingCall>fault.call, fault.address, fault.nbytes, self.device)
        if fault.undoing:
            start = fault.address - fault.lost
            undoing = mapping_error(fault.undoing, UNMAP, start, fault.lost, self.device)
            still_mapped(error, undoing, [(start, fault.lost)])
        raise error

    # -- the calls -----------------------------------------------------------------------------------------------------

    cdef int take_addresses(self, uint64_t nbytes, uint64_t* address, bfc_mapping_fault* fault) noexcept nogil:
        cdef int result = self.driver.take_addresses(nbytes, address) if self.books.native.is_size(nbytes) else ODD_SIZE
        if result != SUCCESS:
            return self.failed(RESERVE, result, 0, nbytes, fault)
        self.lock.wait_and_acquire()
        result = self.books.native.reserved(address[0], nbytes)
        self.lock.release()
        if result != 0:
            # Nobody else knows these addresses.
            self.driver.end(UNRESERVE, address[0], nbytes)
            return self.failed(RESERVE, result, 0, nbytes, fault)
        return 0

    cdef int give_addresses_back(self, uint64_t address, uint64_t nbytes, bfc_mapping_fault* fault) noexcept nogil:
        cdef TakenReservation taken
        cdef int result
        self.lock.wait_and_acquire()
        result = self.books.native.may_unreserve(address, nbytes)
        if result == 0:     # before the driver has them: another thread may get them at once
            self.books.native.take_reservation(address, taken)
        else:
            self.refused(UNRESERVE, result, address, nbytes, fault)
        self.lock.release()
        if result != 0:
            return result
        result = self.driver.end(UNRESERVE, address, nbytes)
        if result != SUCCESS:
            self.lock.wait_and_acquire()
            self.books.native.put_back(taken)
            self.lock.release()
            self.failed(UNRESERVE, result, address, nbytes, fault)
        return result

    cdef int make(self, uint64_t nbytes, uint64_t* handle, bfc_mapping_fault* fault) noexcept nogil:
        cdef int result = self.driver.make(nbytes, handle) if self.books.native.is_size(nbytes) else ODD_SIZE
        if result != SUCCESS:
            return self.failed(CREATE, result, 0, nbytes, fault)
        self.lock.wait_and_acquire()
        result = self.books.native.created(handle[0], nbytes)
        self.lock.release()
        if result != 0:
            self.driver.end(RELEASE, handle[0], 0)
            return self.failed(CREATE, result, 0, nbytes, fault)
        return 0

    cdef int let_go(self, uint64_t handle, bfc_mapping_fault* fault) noexcept nogil:
        cdef TakenPage taken
        cdef int result
        self.lock.wait_and_acquire()
        self.books.native.take_page(handle, taken)      # before the driver has it: the number may be another page's
        self.lock.release()
        if taken.empty():
            fault.lost = handle
            return self.failed(RELEASE, UNKNOWN_PAGE, 0, 0, fault)
        result = self.driver.end(RELEASE, handle, 0)
        if result != SUCCESS:
            self.lock.wait_and_acquire()
            self.books.native.hold_again(taken)
            self.lock.release()
            self.failed(RELEASE, result, handle, 0, fault)
        return result

    cdef int put(self, uint64_t address, const uint64_t* handles, size_t count,
                 bfc_mapping_fault* fault) noexcept nogil:
        cdef MappingRun run
        cdef size_t done = 0
        cdef int result
        self.lock.wait_and_acquire()
        result = self.books.native.plan_map(address, handles, count, &run)
        if result == 0:
            result = self.books.native.mapped(run, count)       # or another thread might map there, too
        if result != 0:
            self.refused(MAP, result, address, 0 if run.mappings.empty() else run.nbytes(), fault)
        self.lock.release()
        if result != 0:
            return result
        result = self.map_pages(&run, &done)
        if result == SUCCESS:
            return 0
        self.failed(MAP, result, run.mappings[done].start, run.mappings[done].end() - run.mappings[done].start, fault)
        if done:
            fault.undoing = self.driver.end(UNMAP, address, fault.address - address)
        if fault.undoing:
            fault.lost = fault.address - address
            # What could not be unmapped stays in the books, so that it can be unmapped later.
            run.drop_first(done)
        self.lock.wait_and_acquire()
        self.books.native.unmapped(run)
        self.lock.release()
        return result

    cdef CUresult map_pages(self, MappingRun* run, size_t* done) noexcept nogil:
        """Maps pages end to end, as far as that goes: `done` of them."""
        cdef int mode
        cdef CUresult result = self.driver.context.enter(&mode)
        cdef MappedPage* page
        if result != SUCCESS:
            return result
        while result == SUCCESS and done[0] < run.mappings.size():
            page = run.mappings[done[0]].page.get()
            result = cu.memory_map(run.mappings[done[0]].start, page.nbytes, 0, page.number, 0)
            done[0] += result == SUCCESS
        self.driver.context.leave(mode)
        return result

    cdef int give_access(self, uint64_t address, uint64_t nbytes, bfc_mapping_fault* fault) noexcept nogil:
        cdef MappingRun run
        cdef vector[Access] access
        cdef uint64_t changes
        cdef int result
        cdef cbool is_new = True
        while is_new:       # again if a peer was enabled meanwhile
            self.lock.wait_and_acquire()
            result = self.books.native.find_run(address, nbytes, &run)
            if result == 0 and not try_assign(access, self.access):
                result = NO_HOST_MEMORY
            if result == 0:
                # Before the call: a peer that is enabled meanwhile must find this run.
                self.books.native.accessible(run)
                changes = self.access_changes
            else:
                self.refused(SET_ACCESS, result, address, nbytes, fault)
            self.lock.release()
            if result != 0:
                return result
            result = self.driver.allow(address, nbytes, access.data(), access.size())
            self.lock.wait_and_acquire()
            if result != SUCCESS:
                self.books.native.put_access_back(run)
            is_new = result == SUCCESS and changes != self.access_changes
            self.lock.release()
        return self.failed(SET_ACCESS, result, address, nbytes, fault) if result != SUCCESS else 0

    cdef int take_out(self, uint64_t address, uint64_t nbytes, bfc_mapping_fault* fault) noexcept nogil:
        cdef MappingRun run
        cdef int result
        self.lock.wait_and_acquire()
        result = self.books.native.find_run(address, nbytes, &run)
        if result == 0:
            # Before the driver has unmapped it: from then on another thread may map there.
            self.books.native.unmapped(run)
        else:
            self.refused(UNMAP, result, address, nbytes, fault)
        self.lock.release()
        if result != 0:
            return result
        result = self.driver.end(UNMAP, address, nbytes)
        if result != SUCCESS:
            self.lock.wait_and_acquire()
            self.books.native.mapped(run, run.mappings.size())
            self.lock.release()
            self.failed(UNMAP, result, address, nbytes, fault)
        return result

    # -- without the GIL -----------------------------------------------------------------------------------------------

    def native(self):
        """The capsule of `include/bfc_mapping.h`, which keeps this object alive."""
        self.table.self = <void*>self
        self.table.reserve = <int (*)(void*, uint64_t, uint64_t*, bfc_mapping_fault*) noexcept nogil>native_reserve
        self.table.unreserve = <int (*)(void*, uint64_t, uint64_t, bfc_mapping_fault*) noexcept nogil>native_unreserve
        self.table.create = <int (*)(void*, uint64_t, uint64_t*, bfc_mapping_fault*) noexcept nogil>native_create
        self.table.release = <int (*)(void*, uint64_t, bfc_mapping_fault*) noexcept nogil>native_release
        self.table.map = <int (*)(void*, uint64_t, const uint64_t*, size_t,
                                  bfc_mapping_fault*) noexcept nogil>native_map
        self.table.set_access = <int (*)(void*, uint64_t, uint64_t, bfc_mapping_fault*) noexcept nogil>native_set_access
        self.table.unmap = <int (*)(void*, uint64_t, uint64_t, bfc_mapping_fault*) noexcept nogil>native_unmap
        self.table.raise_error = native_raise_error
        Py_INCREF(self)
        try:
            return PyCapsule_New(&self.table, BFC_NATIVE_MAPPING, let_go)
        except BaseException:
            Py_DECREF(self)
            raise

    def holds(self, uint64_t address):
        """Whether an address is reserved here."""
        self.lock.wait_and_acquire()
        cdef cbool found = self.books.native.find(address) != NULL
        self.lock.release()
        return found

    # -- peers ---------------------------------------------------------------------------------------------------------

    def enable_peer(self, int peer):
        """Gives a device access to all memory that is accessible now, or becomes so later."""
        cdef tuple before = self.peers, wanted = (*before, peer)
        if peer == self.device or peer in before:
            return
        # Nothing under the lock may fail.
        self.access.reserve(self.access.size() + 1)
        done = []
        self.lock.wait_and_acquire()
        self.access.push_back(access_of(peer, True))
        self.access_changes += 1
        self.lock.release()
        # Before the runs are gone through: memory that becomes accessible meanwhile has the peer already.
        self.peers = wanted
        try:
            for address, nbytes in self.books.accessible_runs():
                self.allow(address, nbytes, peer, True)
                done.append((address, nbytes))
        except BaseException as error:
            self.take_peer_back(before, peer, done, error)
            raise

    cdef int allow(self, uint64_t address, uint64_t nbytes, int peer, bint allowed) except -1:
        cdef Access access = access_of(peer, allowed)
        cdef CUresult result
        with nogil:
            result = self.driver.allow(address, nbytes, &access, 1)
        if result != SUCCESS:
            raise mapping_error(result, SET_ACCESS, address, nbytes, self.device)
        return 0

    cdef int take_peer_back(self, tuple before, int peer, list runs, error) except -1:
        cdef size_t i
        self.peers = before
        self.lock.wait_and_acquire()
        for i in range(self.access.size()):
            if self.access[i].location.id == peer:
                self.access.erase(self.access.begin() + i)
                break
        self.access_changes += 1
        self.lock.release()
        for address, nbytes in runs:
            try:
                self.allow(address, nbytes, peer, False)
            except SubAllocatorError as undoing:
                error.add_note(f"device {peer} keeps access to {nbytes} bytes at {address:#x}: {undoing}")
        return 0


cdef int native_reserve(CUDAPages pages, uint64_t nbytes, uint64_t* address, bfc_mapping_fault* fault) noexcept nogil:
    return pages.take_addresses(nbytes, address, fault)


cdef int native_unreserve(CUDAPages pages, uint64_t address, uint64_t nbytes, bfc_mapping_fault* fault) noexcept nogil:
    return pages.give_addresses_back(address, nbytes, fault)


cdef int native_create(CUDAPages pages, uint64_t nbytes, uint64_t* handle, bfc_mapping_fault* fault) noexcept nogil:
    return pages.make(nbytes, handle, fault)


cdef int native_release(CUDAPages pages, uint64_t handle, bfc_mapping_fault* fault) noexcept nogil:
    return pages.let_go(handle, fault)


cdef int native_map(CUDAPages pages, uint64_t address, const uint64_t* handles, size_t count,
                    bfc_mapping_fault* fault) noexcept nogil:
    return pages.put(address, handles, count, fault)


cdef int native_set_access(CUDAPages pages, uint64_t address, uint64_t nbytes,
                           bfc_mapping_fault* fault) noexcept nogil:
    return pages.give_access(address, nbytes, fault)


cdef int native_unmap(CUDAPages pages, uint64_t address, uint64_t nbytes, bfc_mapping_fault* fault) noexcept nogil:
    return pages.take_out(address, nbytes, fault)


cdef int native_raise_error(void* pages, const bfc_mapping_fault* fault) except -1:
    return (<CUDAPages>pages).raise_error(fault)


cdef void let_go(object capsule) noexcept:
    Py_DECREF(<object>(<bfc_native_mapping*>PyCapsule_GetPointer(capsule, BFC_NATIVE_MAPPING)).self)
