"""Private pools: who uses them, and which requests are diverted into them. `PoolUses` is for
threads that do not hold the lock."""

import operator
import reprlib

cimport cython
from cython.operator cimport dereference as deref, preincrement as incremented
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_push_back
from bfc._core cimport NO_PAIR, BinSet, Lane, Pool, Region
from bfc.allocators._lock cimport Lock, acquire_lock

from bfc.errors import out_of_host_memory
from bfc.pytorch.words import OUR_TAGS as _OUR_TAGS

cdef extern from "pool_ids.hpp" namespace "bfc" nogil:
    uint64_t thread_number() noexcept
    cbool try_add(KnownPools& pools, PoolId id, PrivatePool added) noexcept


cdef uint64_t this_thread() noexcept nogil:
    """The number of the thread. Other modules ask for it here: a copy of thread_number() would count from 1 again."""
    return thread_number()


cdef PoolId id_of(pool) except *:
    """The id that two integers are. Raises TypeError or ValueError for anything else."""
    try:
        first, second = pool
        # Any integer type, but no float: (1.0, 0) would be another pool's id by mistake.
        first, second = operator.index(first), operator.index(second)
    except (TypeError, ValueError):
        raise TypeError(f"the id of a pool is two integers, such as (1, 0), not {reprlib.repr(pool)}") from None
    if not (0 <= first < 2**64 and 0 <= second < 2**64):
        raise ValueError(f"the two integers of a pool's id are from 0 to 2**64 - 1, not {reprlib.repr(pool)}")
    return PoolId(first, second)


cdef Scope scope_of(pool, streams) except *:
    """The scope that `streams` names: the requests of this thread ("thread"), of every stream ("all"), of no stream
    ("none"), or of one stream (its handle)."""
    cdef Scope scope = Scope(id_of(pool), EVERY_STREAM, 0, this_thread())
    if is_default(scope.pool):
        raise ValueError("(0, 0) is the default pool, where all goes that is not diverted: give another id")
    # A tag's memory sleeps, and would take a user's pool of that id with it.
    if scope.pool.first == _OUR_TAGS:
        raise ValueError(f"pool ids that begin with {_OUR_TAGS} (2**62) belong to tags: give another id")
    if streams == "thread":
        scope.kind = ONE_THREAD
        # A number of our own: Python gives the ident of a thread that has ended to a new one.
        scope.of = this_thread()
    elif streams == "none":
        scope.kind = NO_STREAM
    elif isinstance(streams, int):
        scope.kind = ONE_STREAM
        scope.of = streams
    elif streams != "all":
        raise ValueError(f"streams is 'all', 'thread', 'none' or a stream, not {reprlib.repr(streams)}")
    return scope


cdef cbool holds_memory(Pool pool, PoolId id) noexcept nogil:
    """Whether a private pool has regions, or pages in its ranges."""
    cdef uint64_t[2] name = [id.first, id.second]
    cdef uint32_t pair = pool.lanes.pool_sets.first(name), kind
    cdef BinSet* owner
    while pair != NO_PAIR:
        for kind in range(2):
            owner = &pool.bin_sets[2 * pair + kind]
            if (is_same_pool(pool_of(&owner.lane), id)
                    # A range without memory is addresses alone. PyTorch counts calls here, which do not match (2.16,
                    # 66g).
                    and (owner.mapped_bytes > 0 or (owner.regions > 0 and not owner.is_range))):
                return True
        pair = pool.lanes.pool_sets.next(pair)
    return False


@cython.final
cdef class PrivatePools:
    """The private pools of an allocator, as data. The default pool is none of them."""

    # -- pools --------------------------------------------------------------------------------------------------------

    cdef PrivatePool* find(self, PoolId id) noexcept nogil:
        """NULL if there is no such pool."""
        cdef KnownPools.iterator found = self.known.find(id)
        if found == self.known.end():
            return NULL
        return &deref(found).second

    cdef int64_t uses(self, PoolId id) noexcept nogil:
        """How many references a pool has; -1 of one that is not known."""
        cdef PrivatePool* found = self.find(id)
        return found.uses if found != NULL else -1

    cdef cbool know(self, PoolId id) noexcept nogil:
        """Adds a pool without references, unless it is there, or is the default one. Returns False if there is no
        memory."""
        return is_default(id) or self.find(id) != NULL or self.add(id)

    cdef cbool add(self, PoolId id) noexcept nogil:
        return try_add(self.known, id, PrivatePool(id, 0, 0, 0))

    cdef cbool use(self, PoolId id) noexcept nogil:
        """Adds a reference to a pool, and the pool if it is new. Returns False if there is no memory."""
        if self.find(id) == NULL and not self.add(id):
            return False
        self.find(id).uses += 1
        return True

    cdef cbool release(self, PoolId id) noexcept nogil:
        """Takes a reference away. Returns False if there was none."""
        cdef PrivatePool* found = self.find(id)
        if found == NULL or found.uses == 0:
            return False
        found.uses -= 1
        return True

    cdef void drop_empty(self, Pool pool, PoolId only) noexcept nogil:
        """Forgets the pools that were released and hold no memory: this one, or all of them for the default pool."""
        cdef KnownPools.iterator at
        if not is_default(only):
            at = self.known.find(only)
            if at != self.known.end() and deref(at).second.uses == 0 and not holds_memory(pool, only):
                self.known.erase(at)
            return
        at = self.known.begin()
        while at != self.known.end():
            # Live tensors may outlast their pool: it goes when its memory has gone.
            if deref(at).second.uses > 0 or holds_memory(pool, deref(at).first):
                incremented(at)
            else:
                at = self.known.erase(at)

    cdef cbool next_released(self, PoolId after, PrivatePool* found) noexcept nogil:
        """The first pool without references behind an id. Returns whether there is one."""
        # By id and not by an iterator: the lock is free between two pools, and others come and go.
        cdef KnownPools.iterator at = self.known.upper_bound(after)
        while at != self.known.end() and deref(at).second.uses > 0:
            incremented(at)
        if at != self.known.end():
            found[0] = deref(at).second
        return at != self.known.end()

    cdef void keep_used(self, Pool pool, cbool with_default, PoolId only, vector[Region]& regions) noexcept nogil:
        """Takes off a list of free regions those that must stay: of private pools that have references, and unless
        `with_default` of the default pool. `only`: all but those of one private pool; the default pool names none."""
        cdef size_t kept = 0, i
        cdef PoolId id
        for i in range(regions.size()):
            id = pool_of(&pool.bin_sets[pool.chunks[regions[i].first].bin_set].lane)
            # Regions of a pool without a record may go, too: its last reference went before its memory.
            if (with_default if is_default(id) else self.uses(id) <= 0) and (is_default(only)
                                                                             or is_same_pool(id, only)):
                regions[kept] = regions[i]
                kept += 1
        regions.resize(kept)

    cdef cbool some_default(self, Pool pool, vector[Region]& regions) noexcept nogil:
        """Whether some of these regions, each one chunk, are of the default pool."""
        cdef size_t i
        for i in range(regions.size()):
            if not is_private(&pool.bin_sets[pool.chunks[regions[i].first].bin_set].lane):
                return True
        return False

    # -- scopes -------------------------------------------------------------------------------------------------------

    cdef cbool is_in_use(self, Scope* scope, cbool in_other_threads) noexcept nogil:
        """Whether a scope of the same pool is open, which forbids this one. Several threads may have one each, unless
        `in_other_threads` counts too."""
        cdef Scope other
        for other in self.scopes:
            # With `strict` any second scope of a pool is an error, as beginAllocateToPool's is. Else only one whose end
            # could not be told from the first's.
            if is_same_pool(other.pool, scope.pool) and (in_other_threads or scope.kind != ONE_THREAD
                                                         or other.kind != ONE_THREAD):
                return True
        return False

    cdef cbool begin(self, Scope scope) noexcept nogil:
        """Opens a scope. Returns False if there is no memory."""
        cdef cbool added = try_push_back(self.scopes, scope)
        self.count_scopes()
        return added

    cdef void count_scopes(self) noexcept nogil:
        cdef Scope scope
        cdef size_t captures = 0
        for scope in self.scopes:
            captures += scope.kind == ONE_CAPTURE
        self.open_captures.set(captures)
        self.open_scopes.set(self.scopes.size())

    cdef cbool end(self, PoolId id) noexcept nogil:
        """Closes the newest scope of a pool that is this thread's or of streams. Returns False if there is none."""
        cdef size_t i = self.scopes.size()
        while i > 0:
            i -= 1
            if is_same_pool(self.scopes[i].pool, id) and (self.scopes[i].kind != ONE_THREAD
                                                          or self.scopes[i].of == thread_number()):
                self.scopes.erase(self.scopes.begin() + i)
                self.count_scopes()
                return True
        return False

    cdef void divert(self, Lane* lane, uint64_t stream, PoolId joined) noexcept nogil:
        """Puts the pool into a lane that a request of this thread for this stream is diverted to, if any: that of the
        newest scope that takes it, as upstream's filters do. A capture takes the streams that belong to it. `joined`:
        the pool of the capture that the stream belongs to, in whichever thread that has begun; the default pool where
        it belongs to none, or where it is not known that it belongs to another than one begun on this very stream.
        What this thread asks for without such a stream goes to its newest capture, too."""
        cdef Scope scope
        cdef size_t i
        cdef cbool takes
        if is_default(joined):
            for scope in self.scopes:
                if scope.kind == ONE_CAPTURE and scope.of == stream:
                    joined = scope.pool
        i = self.scopes.size()
        while i > 0:
            i -= 1
            scope = self.scopes[i]
            if scope.kind == ONE_CAPTURE:
                # Work that another thread queues on a stream that does not capture is none of the graph.
                takes = scope.thread == thread_number() if is_default(joined) else is_same_pool(scope.pool, joined)
            elif scope.kind == NO_STREAM:   # a replay or a library names the pool with each request
                takes = not is_default(joined) and is_same_pool(scope.pool, joined)
            else:
                takes = (scope.kind == EVERY_STREAM or (scope.kind == ONE_STREAM and scope.of == stream)
                         or (scope.kind == ONE_THREAD and scope.of == thread_number()))
            if takes:
                put_in_pool(lane, scope.pool)
                return
        if not is_default(joined):
            put_in_pool(lane, joined)

    cdef cbool may_have_joined(self, uint64_t stream) noexcept nogil:
        """Whether a stream may belong to a capture that was begun on another one: the source knows. The default stream
        cannot be captured."""
        return self.open_captures.get() > 0 and stream > 1 and not self.captures(stream)

    cdef cbool captures(self, uint64_t stream) noexcept nogil:
        """Whether a capture that begins on a stream is in a scope."""
        cdef Scope scope
        for scope in self.scopes:
            if scope.kind == ONE_CAPTURE and scope.of == stream:
                return True
        return False


cdef tuple name_of(PoolId id):
    return id.first, id.second


@cython.final
@cython.no_gc_clear
cdef class PoolUses:
    """References to private pools, and the scopes that divert allocations into them."""

    cdef int attach(self, Lock* lock, PrivatePools private_pools) except -1:
        """Takes the allocator's lock, which must live as long, and its pools."""
        self.lock = lock
        self.private_pools = private_pools
        return 0

    cdef int add_reference(self, PoolId id) except -1:
        """Adds a reference to a pool, and makes the pool if it is new."""
        # Threads take references and let them go side by side.
        acquire_lock(self.lock[0])
        cdef bint added = self.private_pools.use(id)
        self.lock.release()
        if not added:
            raise out_of_host_memory()
        return 0

    cdef bint release_reference(self, PoolId id) except -1:
        """Takes a reference away. Returns whether it was the last one."""
        # Of two threads that let go, one has the last reference.
        acquire_lock(self.lock[0])
        cdef bint held = self.private_pools.release(id)
        cdef bint was_last = self.private_pools.uses(id) == 0
        self.lock.release()
        if not held:
            raise RuntimeError(f"pool {name_of(id)} was released already, or never made")
        return was_last

    cdef int64_t count_references(self, PoolId id) except -1:
        """How many references a pool has; 0 if it is not known."""
        # A pool that another thread makes moves the list.
        acquire_lock(self.lock[0])
        cdef int64_t uses = self.private_pools.uses(id)
        self.lock.release()
        return max(uses, <int64_t>0)

    cdef int begin(self, Scope scope, bint strict) except -1:
        """Opens a scope, which holds a reference."""
        # Other threads open scopes, so both answers are of one moment.
        acquire_lock(self.lock[0])
        cdef bint is_in_use = self.private_pools.is_in_use(&scope, strict)
        cdef bint captured = scope.kind == ONE_CAPTURE and self.private_pools.captures(scope.of)
        self.lock.release()
        if captured:
            raise RuntimeError(f"stream {scope.of:#x} is captured already: end that capture first")
        if is_in_use:
            raise RuntimeError(f"pool {name_of(scope.pool)} is in use already: end that use first")
        # Before the scope is open: a pool that requests are diverted to must not go.
        self.add_reference(scope.pool)
        # A miss of another thread reads the list of scopes.
        acquire_lock(self.lock[0])
        cdef bint added = self.private_pools.begin(scope)
        self.lock.release()
        if not added:
            # Upstream's begin leaks its reference when it fails.
            self.release_reference(scope.pool)
            raise out_of_host_memory()
        return 0

    cdef list captures(self):
        """The scopes of captures as (stream, pool)."""
        cdef vector[Scope] scopes
        cdef Scope scope
        cdef bint copied = True
        # They are copied, since Python may run anything while it makes tuples of them.
        acquire_lock(self.lock[0])
        for scope in self.private_pools.scopes:
            copied = copied and try_push_back(scopes, scope)
        self.lock.release()
        if not copied:
            raise out_of_host_memory()
        found = []
        for scope in scopes:
            if scope.kind == ONE_CAPTURE:
                found.append((scope.of, (scope.pool.first, scope.pool.second)))
        return found

    cdef int end(self, PoolId id) except -1:
        """Closes a scope; its reference stays."""
        # A miss of another thread reads the list of scopes.
        acquire_lock(self.lock[0])
        cdef bint found = self.private_pools.end(id)
        self.lock.release()
        if not found:
            raise RuntimeError(f"pool {name_of(id)} is not in use in this thread")
        return 0

    cdef int set_among(self, vector[PoolId]* ids, PoolId id, bint wanted) except -1:
        """Puts a pool on a list of pools, or takes it off."""
        # Requests of other threads read these lists.
        acquire_lock(self.lock[0])
        cdef bint is_kept = put_or_take(ids[0], id, wanted)
        self.lock.release()
        if not is_kept:
            raise out_of_host_memory()
        return 0
