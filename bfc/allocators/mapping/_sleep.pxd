"""Sleep and wake: memory goes and comes back while its addresses stay."""

from libc.stdint cimport uint64_t

from bfc.allocators.mapping._address_ranges cimport AddressRanges, Page, TagTransition

cdef object put_to_sleep(AddressRanges memory, dict ways, object keep_limit)
cdef uint64_t wake_up(AddressRanges memory, list tags, object fill) except? 0xFFFFFFFFFFFFFFFF
cdef void take_over_transitions(AddressRanges memory) noexcept
cdef void give_page_up(AddressRanges memory, Page* page) noexcept
cdef uint64_t bytes_asleep(AddressRanges memory) noexcept
