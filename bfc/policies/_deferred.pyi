class DeferredFree:
    """A chunk that was freed in a scope, and the streams that use it."""

class Deferred:
    """The frees that wait for the end of a scope. It asks the source for fences, and never calls an allocator."""
