"""Whether the interpreter is about to go away."""

cdef bint exiting       # from then on frees do nothing: the driver, or half of Python, may be gone
