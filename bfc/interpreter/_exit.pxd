"""Whether the interpreter is about to exit."""

cdef bint exiting       # from then on frees do nothing: the driver, or half of Python, may be gone
