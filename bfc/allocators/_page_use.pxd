"""Which pages are used through which addresses, and how much of each."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle, Window
from bfc.allocators._pages cimport Pages, View

cdef struct PageUse:
    uint64_t page_size
    uint64_t pages
    uint64_t in_use
    uint64_t sparse                     # of the pages in use, those with less than a tenth of their bytes in use

cdef cbool list_pages(Pages pages, ChunkHandle first, vector[uint32_t]& numbers) noexcept nogil
cdef cbool count_use(Pages pages, PageUse* use) noexcept nogil
cdef void add_use(Pages pages, ChunkHandle handle, vector[uint64_t]& used) noexcept nogil
cdef Window* window_of(Pages pages, ChunkHandle handle) noexcept nogil
cdef View* view_of(Pages pages, ChunkHandle handle) noexcept nogil
