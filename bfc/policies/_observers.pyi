class Observers:
    """Free-memory callbacks and out-of-memory observers. They are called without a lock.

    In a thread that runs one of them already, none is called: it may allocate, and be refused.
    """
