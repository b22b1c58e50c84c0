"""Operations on containers that return False if the host is out of memory (nothrow.hpp)."""

from libc.stddef cimport size_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cbool try_push_back[T](vector[T]& items, const T& item) noexcept
    cbool try_reserve[T](vector[T]& items, size_t count) noexcept
    cbool try_make_room[T](vector[T]& items, size_t count) noexcept
    cbool try_assign[T](vector[T]& items, const vector[T]& others) noexcept
    cbool try_store[K, T](cmap[K, T]& items, const K& key, const T& item) noexcept
