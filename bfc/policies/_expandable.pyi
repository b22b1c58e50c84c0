from bfc.policies._sleep import Sleeper

class Range:
    """Reserved addresses for one stream, one pool, and small or large chunks: slots of one size, each with a page of
    memory or with none.
    """

class ExpandableSegments(Sleeper):
    """The ranges of an allocator, and what is mapped in them. It never calls the allocator."""
