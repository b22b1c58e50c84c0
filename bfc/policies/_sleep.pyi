from bfc.allocators._tags import Tag
from bfc.policies._mapper import Mapper

def by_number(tag: Tag) -> int: ...
def is_something(way: object) -> bool: ...

class Run:
    """Mapped memory that lies end to end, or the addresses for it."""

class Nap:
    """A tag that is falling asleep, or waking."""

class Sleeper(Mapper):
    """Memory that can sleep. It never calls the allocator."""

class NoRoomError(Exception):
    """The device has no memory for all pages of a tag."""
