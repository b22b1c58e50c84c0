class Faults:
    """What a sub-allocator fails with while memory goes back. Noting it needs no memory of the host."""

class Page:
    """A page, made before the sub-allocator is asked for one: what goes wrong later needs no memory of the host."""

class Range:
    """Reserved addresses for one stream, one pool, and small or large chunks: slots of one size, each with a page of
    memory or with none.
    """

class ExpandableSegments:
    """The ranges of an allocator, and what is mapped in them. It never calls the allocator."""
