class Observers:
    """Free-memory callbacks and out-of-memory observers. They are called without a lock.

    None is called in a thread that is already running one: that one may itself allocate, and be
    refused.
    """
