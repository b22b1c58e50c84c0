"""Whether the interpreter is about to exit: the one exit hook that allocators, drivers and pools share."""

import atexit

exiting = False


@atexit.register
def _note_the_exit():
    global exiting
    exiting = True


def is_exiting():
    """Whether Python's exit has begun. From then on frees do nothing: the driver, or half of Python, may be gone.

    Returns
    -------
    bool
        False until the functions that are registered with `atexit` run.
    """
    return bool(exiting)
