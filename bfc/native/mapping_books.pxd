"""The books of a sub-allocator that maps memory (mapping_books.hpp)."""

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.memory cimport shared_ptr
from libcpp.vector cimport vector

cdef extern from "mapping_books.hpp" namespace "bfc" nogil:
    cdef cppclass MappedPage:
        uint64_t number
        uint64_t nbytes
        uint64_t mappings
        cbool is_held
        cbool is_gone()

    cdef cppclass NativeMapping "bfc::Mapping":
        uint64_t start
        shared_ptr[MappedPage] page
        cbool has_access
        uint64_t end()

    cdef cppclass NativeReservation "bfc::Reservation":
        uint64_t start
        uint64_t nbytes
        vector[NativeMapping] mappings

    cdef cppclass MappingRun:
        vector[NativeMapping] mappings
        uint64_t start()
        uint64_t nbytes()
        void drop_first(size_t count)
        vector[shared_ptr[MappedPage]] leaving() except +

    cdef cppclass TakenPage "bfc::MappingBooks::Pages::node_type":
        cbool empty()

    cdef cppclass TakenReservation "bfc::MappingBooks::Reservations::node_type":
        cbool empty()

    cdef enum:
        NO_HOST_MEMORY "bfc::kNoMemoryForBooks"
        ODD_SIZE "bfc::kOddSize"
        NO_RESERVATION "bfc::kNoReservation"
        STILL_MAPPED "bfc::kStillMapped"
        UNKNOWN_PAGE "bfc::kUnknownPage"
        NO_PAGES "bfc::kNoPages"
        NOT_RESERVED "bfc::kNotReserved"
        ODD_ADDRESS "bfc::kOddAddress"
        PAST_END "bfc::kPastEnd"
        MAPPED_ALREADY "bfc::kMappedAlready"
        NO_RUN "bfc::kNoRun"

    cdef cppclass NativeBooks "bfc::MappingBooks":
        uint64_t granularity
        uint64_t page_bytes
        uint64_t where
        cmap[uint64_t, shared_ptr[MappedPage]] pages
        cmap[uint64_t, NativeReservation] reservations
        cbool is_size(uint64_t nbytes)
        int reserved(uint64_t address, uint64_t nbytes)
        int may_unreserve(uint64_t address, uint64_t nbytes)
        void take_reservation(uint64_t address, TakenReservation& taken)
        void put_back(TakenReservation& taken)
        NativeReservation* find(uint64_t address)
        int created(uint64_t number, uint64_t nbytes)
        shared_ptr[MappedPage] held(uint64_t number)
        void take_page(uint64_t number, TakenPage& taken)
        void hold_again(TakenPage& taken)
        int plan_map(uint64_t address, const uint64_t* numbers, size_t count, MappingRun* run)
        int mapped(const MappingRun& run, size_t count)
        int find_run(uint64_t address, uint64_t nbytes, MappingRun* run)
        void unmapped(const MappingRun& run)
        void accessible(const MappingRun& run)
        void put_access_back(const MappingRun& run)
