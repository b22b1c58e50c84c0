"""Tags of an allocator, as a user and the integrations put them to sleep, wake them and ask about them."""

from libc.stdint cimport uint64_t

from bfc.native.turns cimport TurnAt
from bfc.allocators._private_pools cimport PoolId, id_of
from bfc.allocators._frees cimport AGAIN, QUERY, RECORD, WAIT
from bfc.allocators._tags cimport TAG_POOLS, Tag, count_tag, no_mapping, some_kept
from bfc.allocators.mapping._sleep cimport put_to_sleep
from bfc.allocators._chunk_allocator cimport ChunkAllocator, closed

from bfc.errors import SettingsError
from bfc.units import parse_bytes


cdef object put_tags_to_sleep(ChunkAllocator allocator, keep, drop, keep_limit):
    """`Allocator.sleep`."""
    if allocator.life.is_closed:
        raise closed()
    cdef dict ways = allocator.tags.ways_from(keep, drop)
    # An allocator that has mapped memory before its settings changed can still put that to sleep.
    if not (allocator.mapped.is_on or allocator.mapped.are_some() or allocator.source.blocks):
        raise no_mapping(allocator)
    if allocator.device.kind == "simulated" and some_kept(ways):
        raise SettingsError("a simulated device has no contents that could be kept", key="keep", where="sleep()",
                            hint="drop=[...], or a bfc.HostSubAllocator, whose memory can be written")
    allocator.frees.drain(RECORD | QUERY | AGAIN | WAIT)     # what was freed and waits for other streams
    return put_to_sleep(allocator.mapped, ways, None if keep_limit is None else parse_bytes(keep_limit))


cdef dict stats_of_tags(ChunkAllocator allocator):
    """`Allocator.tag_stats`."""
    cdef Tag tag
    cdef uint64_t nbytes, allocations
    cdef dict found = {}
    for tag in list(allocator.tags.by_name.values()):
        nbytes = count_tag(allocator.pool, allocator.lock, allocator.tags, tag.number, &allocations)
        found[tag.name] = {
            "bytes_in_use": nbytes,
            "allocations": allocations,
            "asleep": bool(tag.is_asleep),
            "bytes_kept": tag.kept.nbytes if tag.kept is not None else 0,
        }
    return found


cdef object tags_asleep(ChunkAllocator allocator):
    """`Allocator.asleep`."""
    cdef Tag tag
    cdef set names = set()
    for tag in list(allocator.tags.by_name.values()):
        if tag.is_asleep:
            names.add(tag.name)
    return frozenset(names)


def tag_everything(ChunkAllocator allocator not None, name):
    """From now on what is allocated outside of all scopes belongs to a tag, in every thread and for good."""
    cdef TurnAt turn
    turn.take(allocator)
    allocator.tags.cover(name)


def sleeps_with(ChunkAllocator allocator not None, pool):
    """The name of the tag that a private pool sleeps with now; None: it has memory."""
    cdef TurnAt turn
    turn.take(allocator)
    cdef PoolId id = id_of(pool)
    cdef uint64_t[2] numbers = [id.first, id.second]
    return allocator.tags.name_of_pool(TAG_POOLS, allocator.tags.find_asleep_with(numbers))


def kept_contents(ChunkAllocator allocator not None, ptr, nbytes):
    """What the host keeps of these addresses, as a bytearray; None where nothing is kept."""
    cdef TurnAt turn
    turn.take(allocator)
    cdef Tag tag
    for tag in list(allocator.tags.by_name.values()):
        kept = tag.kept         # another thread may wake the tag
        found = kept.read(ptr, nbytes) if kept is not None else None
        if found is not None:
            return found
    return None
