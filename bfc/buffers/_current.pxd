"""The stream that `use_stream` sets."""

cdef int scopes_open            # in all threads, guarded by the GIL: 0 spares the look-up

cpdef object current_stream()
