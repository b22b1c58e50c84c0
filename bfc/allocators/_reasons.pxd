"""Why an allocation or a free of an allocator has more to do than ask the pool."""

cdef enum Reason:
    HAS_NOTER = 1           # a leak check is told of each allocation
    IS_TRACED = 2           # tracemalloc is told of each allocation
    KEEPS_HISTORY = 4       # Python frames are kept, or hits are noted in a history
    IN_A_TAG = 8            # a scope of a tag is open, in some thread
    FREES_PENDING = 16      # frees were left to a later call
    FREES_DEFERRED = 32     # frees in a scope wait for its end
    FREES_WAIT = 64         # freed memory waits for streams, behind fences of Python
    EVENTS_WAIT = 128       # and behind events, which are asked without the GIL
    SOME_WAIT = FREES_WAIT | EVENTS_WAIT
    IS_TOLD = HAS_NOTER | IS_TRACED | KEEPS_HISTORY     # somebody is told of each allocation
