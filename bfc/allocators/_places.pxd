"""The places of plans in a pool."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle, PlanServer, Pool


cdef ChunkHandle place_or_room(Pool pool, uint64_t rounded, uint64_t requested, uint64_t stream,
                               cbool indexed) noexcept nogil
cdef void read_length(Pool pool, uint32_t index, uint64_t requested) noexcept nogil
cdef ChunkHandle hand_out_room(Pool pool, PlanServer* plan, uint32_t index, int64_t offset, uint64_t rounded,
                               uint64_t requested, uint64_t stream, cbool indexed) noexcept nogil
cdef uint32_t set_of_region(Pool pool, PlanServer* plan, int region) noexcept nogil
cdef PlanServer* plan_in(Pool pool, uint32_t bin_set, int* region) noexcept nogil
cdef uint32_t bind_stream(Pool pool, uint64_t stream) noexcept nogil
cdef cbool add_plan(Pool pool, PlanServer* plan) noexcept nogil
cdef void divide(Pool pool, PlanServer* plan, int region, uint64_t ptr) noexcept nogil
cdef void give_to_plan(Pool pool, PlanServer* plan, int region, uint64_t ptr) noexcept nogil
cdef void point_places(Pool pool, PlanServer* plan, int region) noexcept nogil
cdef void drop_plan(Pool pool, PlanServer* plan) noexcept nogil
cdef cbool list_places(Pool pool, PlanServer* plan, int region, vector[uint32_t]& out) noexcept nogil
