"""Whether the interpreter is about to go away."""

cpdef bint is_exiting() noexcept nogil
