"""Sleep and wake: memory goes and comes back while its addresses stay."""

from libc.stdint cimport uint64_t

from bfc.allocators._allocator cimport Allocator
from bfc.mapping._calls cimport Page
from bfc.mapping._address_ranges cimport AddressRanges, TagTransition

cdef object put_tags_to_sleep(Allocator allocator, AddressRanges memory, dict ways)
cdef int wake_tags(Allocator allocator, AddressRanges memory, list tags, object fill, uint64_t allowed) except -1
cdef void take_over_transitions(AddressRanges memory) noexcept
cdef void give_page_up(AddressRanges memory, Page page) noexcept
cdef void add_run(TagTransition transition, uint64_t ptr, uint64_t nbytes, list pages, bint is_mapped)
