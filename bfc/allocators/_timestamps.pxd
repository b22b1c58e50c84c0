"""Frees that carry a count of the timing counter."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport Pool

cdef void merge_timestamped(Pool pool, uint64_t required, cbool* satisfied) noexcept nogil
cdef void forget_queued(Pool pool) noexcept nogil
