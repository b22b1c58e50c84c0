"""Whether the interpreter is about to go away: the one hook at exit that allocators, drivers and pools share."""

import atexit

cdef bint exiting = False


@atexit.register
def _note_the_exit():
    global exiting
    exiting = True


cpdef bint is_exiting() noexcept nogil:
    """Whether Python's exit has begun. From then on frees do nothing: the driver, or half of Python, may be gone.

    Returns
    -------
    bool
        False until the functions that are registered with `atexit` run.
    """
    return exiting
