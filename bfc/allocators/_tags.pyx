"""Tags: names for parts of an allocator's memory, which can sleep, each for itself.

A scope of a tag is a context variable: it holds in this thread, or in this asyncio task. While one is open, every
allocation from Python takes the slow path, which looks for the scope; those without the GIL ask `tag_without_gil`. Each
policy defines what sleeping does.
"""

from collections.abc import Mapping
from contextvars import ContextVar

cimport cython
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc.native.turns cimport TurnAt, count_by, counted, put, take_turns
from bfc._core cimport IN_USE, STATE, ChunkHandle, Pool, Reasons
from bfc.buffers._scopes cimport NO_OWNER, Entered, enter as enter_owner, leave as leave_owner, number_of_owner
from bfc.allocators._lock cimport Lock, acquire_lock
from bfc.allocators._private_pools cimport PoolId, PrivatePool, PrivatePools
from bfc.allocators._reasons cimport IN_A_TAG

from bfc.errors import AsleepError, SettingsError

_entries = ContextVar("bfc.tags", default=())

#: Where the contents of a tag may go.
WAYS = ("host", "pinned")


cdef list names_from(object names, str argument):
    if isinstance(names, str):
        return [names]
    found = list(names)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{argument} takes names of tags, not {name!r}")
    return found


cdef object way_from(object way):
    if way in WAYS or callable(way):
        return way
    raise ValueError(f'contents are kept in "host" or "pinned" memory, or by a callable, not {way!r}')


@cython.final
cdef class Tag:
    """A name, and whether what was allocated under it sleeps."""


@cython.final
cdef class Entry:
    """One time that a scope was entered."""


cdef class Scope:
    """What `with allocator.tag(name):` enters. It can be nested; the innermost one of an allocator holds."""

    cdef object allocator
    cdef Tags tags
    cdef Tag tag
    cdef list entered       # [token, Entry, the owner's], for each time that it was entered and not left

    def __init__(self):
        raise TypeError("a scope comes from allocator.tag(name)")

    def __enter__(self):
        cdef Entry entry = Entry()
        if self.allocator is None:
            raise TypeError("a scope comes from allocator.tag(name)")
        entry.allocator = self.allocator
        entry.tag = self.tag
        cdef list item = [None, entry, None]
        self.entered.append(item)   # before the variables are set, since the host may have no memory for it
        try:
            if self.tag is None:
                # `tag(None)` is a scope as well: it ends that of an outer one.
                item[2] = enter_owner(NO_OWNER, self.allocator, None, NO_TAG)
            else:
                item[2] = enter_owner(number_of_owner(self.tag.name), self.allocator, None, self.tag.number)
            item[0] = _entries.set((*_entries.get(), entry))
        except BaseException:
            self.entered.remove(item)
            entry.allocator = None      # CPython 3.11 may have set the variable all the same
            if item[2] is not None:
                self.stop_owning(item)
            raise
        # Last: once it counts, every request takes the slow way, and must find the variables set.
        self.tags.count_scopes(1)
        return self

    def __exit__(self, kind=None, error=None, traceback=None):     # *exc_info would need memory for a tuple
        cdef Entry entry
        cdef list item
        cdef Py_ssize_t i
        # From the newest: one scope may be entered by several tasks and threads, each with a token of its own.
        for i in range(len(self.entered) - 1 if self.entered is not None else -1, -1, -1):
            item = self.entered[i]
            try:
                _entries.reset(item[0])
            except ValueError:
                continue    # another thread, or another task, has entered it too
            except MemoryError:
                pass        # the entry stays in the variable, but counts as left
            del self.entered[i]
            entry = item[1]
            # A task that was started in the scope has a copy of the variable, in which the entry counts no more.
            entry.allocator = None
            self.stop_owning(item)
            self.tags.count_scopes(-1)
            return
        raise RuntimeError("this tag was not entered here: write `with allocator.tag(name):`")

    cdef int stop_owning(self, list item) except -1:
        """From now on nothing gets the tag's owner, not even in tasks that were started in the scope."""
        cdef Entered entered = item[2]
        leave_owner(entered)
        return entered.scope.stop()

    def __repr__(self):
        if self.allocator is None:
            return "<tag of nothing>"
        if self.tag is None:
            return f"<no tag of {self.allocator!r}>"
        return f"<tag {self.tag.name!r} of {self.allocator!r}>"


take_turns(Scope, b"")


@cython.final
@cython.no_gc_clear
cdef class Tags:
    """The tags of an allocator: a part of `Allocator`."""

    def __cinit__(self):
        self.by_name = {}

    cdef int attach(self, Lock* lock, Reasons* reasons, PrivatePools private_pools) except -1:
        self.lock = lock
        self.reasons = reasons
        self.private_pools = private_pools
        return 0

    cdef int count_scopes(self, int64_t more) except -1:
        cdef TurnAt turn
        turn.take(self)
        self.reasons.put(IN_A_TAG, count_by(self.scopes_open, more) > 0)
        return 0

    cdef int cover(self, object name) except -1:
        """From now on what is allocated outside of all scopes belongs to a tag, in every thread and for good."""
        cdef uint64_t number = self.find(name).number
        cdef TurnAt turn
        turn.take(self)
        if not self.everywhere:
            self.count_scopes(1)
        put(self.everywhere, number)
        return 0

    cdef Tag find(self, name):
        cdef TurnAt turn
        turn.take(self)
        cdef Tag found = self.by_name.get(name)
        if found is None:
            found = Tag()
            found.name = str(name)
            # Tags are never taken out, so no number comes twice. 0 is no tag.
            found.number = <uint64_t>len(self.by_name) + 1
            # Two threads that name a tag for the first time get the same one.
            found = self.by_name.setdefault(name, found)
        return found

    cdef Tag known(self, name):
        found = self.by_name.get(name)
        if found is None:
            known = ", ".join(map(repr, self.by_name)) or "none"
            raise ValueError(f"unknown tag {name!r}; this allocator has: {known}")
        return found

    cdef uint64_t here(self, object allocator) except? 0xFFFFFFFFFFFFFFFF:
        """The number of the tag that this call allocates in, or NO_TAG."""
        cdef Entry entry
        if counted(self.scopes_open):
            # The innermost one of this allocator: scopes of several are in one variable.
            for entry in reversed(_entries.get()):
                if entry.allocator is allocator:
                    return NO_TAG if entry.tag is None else entry.tag.number
        return counted(self.everywhere)

    cdef cbool is_asleep(self, uint64_t number) noexcept nogil:
        """Whether nothing can be allocated in a tag. Needs the lock."""
        cdef uint64_t asleep
        for asleep in self.asleep:
            if asleep == number:
                return True
        return False

    cdef cbool join(self, PoolId pool, uint64_t tag) noexcept nogil:
        """Notes that a private pool without memory sleeps with a tag. False: the host has no memory. Needs the lock."""
        cdef cbool known = self.private_pools.know(pool)
        if known:
            self.private_pools.find(pool).tag = tag
        return known

    cdef uint64_t tag_of(self, const uint64_t* pool) noexcept nogil:
        """The tag that the memory of a pool sleeps with, or NO_TAG. Needs the lock."""
        # A tag's own memory is a pool by this name, so that it needs neither a record nor a look-up.
        if pool[0] == TAG_POOLS:
            return pool[1]
        cdef PrivatePool* found = self.private_pools.find(PoolId(pool[0], pool[1]))
        return found.tag if found != NULL else <uint64_t>NO_TAG

    cdef uint64_t asleep_with(self, const uint64_t* pool) noexcept nogil:
        """The tag that a private pool sleeps with now, or NO_TAG. Needs the lock."""
        # Nearly always: then no map is searched.
        if self.asleep.empty():
            return NO_TAG
        cdef uint64_t tag = self.tag_of(pool)
        return tag if self.is_asleep(tag) else <uint64_t>NO_TAG

    cdef uint64_t find_asleep_with(self, const uint64_t* pool) noexcept nogil:
        """The same. Takes the lock."""
        acquire_lock(self.lock[0])
        cdef uint64_t tag = self.asleep_with(pool)
        self.lock.release()
        return tag

    cdef int refuse_if_pool_sleeps(self, const uint64_t* pool) except -1 nogil:
        """Refuses a request for a private pool that sleeps."""
        cdef uint64_t tag = self.find_asleep_with(pool)
        if tag != NO_TAG:
            self.refuse_if_asleep(tag)
        return 0

    cdef int refuse_if_asleep(self, uint64_t tag) except -1 with gil:
        """Refuses a request for a tag that sleeps."""
        # A tag falls asleep under the lock. It may do so right after this, so `place` looks again.
        acquire_lock(self.lock[0])
        cdef cbool asleep = self.is_asleep(tag)
        self.lock.release()
        if asleep:
            name = self.name_of_pool(TAG_POOLS, tag)
            raise AsleepError(f"tag {name!r} sleeps: wake({name!r}) before more is allocated in it")
        return 0

    cdef object name_of_pool(self, uint64_t first, uint64_t second):
        """The name of the tag that memory of a pool belongs to, or None."""
        cdef Tag tag
        if first == TAG_POOLS:
            for tag in list(self.by_name.values()):
                if tag.number == second:
                    return tag.name
        return None

    cdef void drop_kept(self) noexcept:
        """Gives up what sleeping tags held: the allocator closes."""
        cdef Tag tag
        for tag in self.by_name.values():
            tag.kept = None

    cdef dict ways_from(self, keep, drop):
        """The way of each tag that is to sleep: None drops its contents."""
        cdef dict ways = {}
        if keep is None and drop is None:
            # sleep() alone drops all: nothing is copied unless it is asked for.
            return dict.fromkeys(self.by_name.values())
        for name in names_from(() if drop is None else drop, "drop"):
            ways[self.known(name)] = None
        if isinstance(keep, Mapping):
            for name in names_from(keep, "keep"):
                tag = self.known(name)
                if tag in ways:
                    raise ValueError(f"tag {name!r} is to be kept and to be dropped: name it once")
                ways[tag] = way_from(keep[name])
        elif keep is not None:
            way = way_from(keep)
            for tag in list(self.by_name.values()):
                ways.setdefault(tag, way)
        return ways

    cdef list to_wake(self, tuple names, fill):
        """The tags that `wake` is asked for; all of them where none is named."""
        cdef dict chosen = {}
        if fill is not None and not (isinstance(fill, int) and 0 <= fill <= 255):
            raise ValueError(f"fill is a byte, from 0 to 255, not {fill!r}")
        for name in names_from(names, "wake"):
            chosen.setdefault(self.known(name))
        return list(chosen or self.by_name.values())


cdef uint64_t count_tag(Pool pool, Lock& lock, Tags tags, uint64_t number, uint64_t* allocations) noexcept:
    """The requested bytes of what lives in a tag, and how many allocations that are."""
    cdef ChunkHandle handle
    cdef uint64_t nbytes = 0
    allocations[0] = 0
    # Chunks are counted at one moment, while no other thread splits any.
    acquire_lock(lock)
    for handle in range(<ChunkHandle>pool.chunk_count):
        if (pool.chunks[handle].state & STATE == IN_USE
                and tags.tag_of(pool.bin_sets[pool.chunks[handle].bin_set].lane.pool) == number):
            nbytes += pool.chunks[handle].requested_size
            allocations[0] += 1
    lock.release()
    return nbytes


cdef object scope_of(object allocator, Tags tags, object name):
    """What `allocator.tag(name)` returns."""
    cdef Scope scope = Scope.__new__(Scope)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"a tag is a str, or None, not {type(name).__name__}")
    if name == "":
        raise ValueError("a tag needs a name")
    scope.allocator = allocator
    scope.tags = tags
    scope.tag = None if name is None else tags.find(name)
    scope.entered = []
    return scope


cdef object no_mapping(object allocator):
    return SettingsError(f"only memory that is mapped can sleep, and {allocator!r} maps none",
                         key="expandable_segments", allowed="True", where="sleep()",
                         hint="bfc.CachingAllocator(sub_allocator, settings='expandable_segments:True'), or "
                              "bfc.BFCAllocator(sub_allocator, virtual_memory=True)")


cdef list names_asleep(list tags):
    cdef Tag tag
    cdef list names = []
    for tag in tags:
        if tag.is_asleep:
            names.append(tag.name)
    return names


cdef bint some_kept(dict ways) noexcept:
    for way in ways.values():
        if way is not None:
            return True
    return False
