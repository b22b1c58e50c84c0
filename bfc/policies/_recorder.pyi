class Recorder:
    """Counts, a history's entries in Python's terms, and the Python frames of allocations, frees and regions.

    The records of the history itself are the pool's.
    """
