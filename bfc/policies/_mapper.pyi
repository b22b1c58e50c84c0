class Faults:
    """What a sub-allocator fails with while memory goes back. Noting it needs no memory of the host."""

class Page:
    """A page, made before the sub-allocator is asked for one: what goes wrong later needs no memory of the host."""

class Mapper:
    """What every part that maps memory for an allocator needs. It never calls the allocator."""
