from bfc.policies._sleep import Sleeper

class Stretch:
    """Reserved addresses of one stream, for small or for large chunks."""

class Retired:
    """A view that is to be unmapped once its stream has finished with it."""

class PageMapper(Sleeper):
    """The pages of an allocator, and where they are mapped. It never calls the allocator."""
