"""Captures of graphs: which are marked, and which pool a stream that captures takes its memory from. What a capture
puts off is in `_fences`."""

cimport cython
from libc.stdint cimport uint64_t

from bfc._core cimport Pool
from bfc.allocators._lock cimport Lock, acquire_lock
from bfc.allocators._private_pools cimport (
    ONE_CAPTURE, PoolId, PoolUses, PrivatePools, Scope, default_pool, id_of, name_of, this_thread,
)
from bfc.allocators._fences cimport Fences


@cython.final
@cython.no_gc_clear
cdef class Captures:
    """The captures that an allocator has been told of: a part of `Allocator`."""

    cdef int attach(self, Lock* lock, Pool pool, Fences fences, PrivatePools private_pools,
                    PoolUses pool_uses) except -1:
        self.lock = lock
        self.pool = pool
        self.fences = fences
        self.private_pools = private_pools
        self.pool_uses = pool_uses
        return 0

    cdef int mark(self, int more) except -1:
        """Counts a capture that begins or ends. A plan rests meanwhile."""
        self.fences.mark_captures(more)
        acquire_lock(self.lock[0])
        self.pool.plan_rests = self.fences.capture_is_marked()
        self.lock.release()
        return 0

    cdef int begin(self, PoolId id, uint64_t stream, bint strict) except -1:
        """Diverts a capture that begins on a stream into a pool, and holds a reference to it."""
        self.pool_uses.begin(Scope(id, ONE_CAPTURE, stream, this_thread()), strict)
        try:
            self.mark(1)
        except BaseException:
            self.pool_uses.end(id)
            self.pool_uses.release_reference(id)
            raise
        return 0

    cdef list streams(self):
        """The streams on which captures have begun, and their pools."""
        return self.pool_uses.captures() if self.private_pools.open_captures.get() else []

    cdef list news_of(self, streams):
        """Which of these streams have joined a capture into a pool since the last call, or left it, as (stream, pool,
        whether it has joined)."""
        cdef dict told = self.fences.told
        found = []
        for stream in sorted({*streams, *told}):
            pool = self.fences.replayed.get(stream) or name_of(self.pool_for(stream))
            pool = pool if pool != (0, 0) else None
            known = told.get(stream)
            if pool == known:
                continue
            if known is not None:
                found.append((stream, told.pop(stream), False))
            if pool is not None:
                told[stream] = pool
                found.append((stream, pool, True))
        return found

    cdef int take_as_captured(self, pool, stream, bint is_captured) except -1:
        """Lets a stream count as captured into a pool, as in the run that is replayed, or no more."""
        if is_captured:
            self.fences.replayed[stream] = pool
        else:
            self.fences.replayed.pop(stream, None)
        return 0

    cdef int forget_streams_of(self, pool) except -1:
        """A capture into a pool has ended, and with it that of all its streams."""
        cdef dict named
        for named in (self.fences.told, self.fences.replayed):
            for stream in list(named) if named else ():
                if named[stream] == pool:
                    named.pop(stream, None)
        return 0

    cdef bint is_captured(self, uint64_t stream, bint strict) except -1:
        """Whether a request for a stream comes in a capture: the stream of this thread captures or, unless `strict`,
        the request's own."""
        if self.fences.is_in_capture(stream):
            return True
        return not strict and self.fences.capture_is_marked() and self.fences.is_capturing(stream)

    cdef PoolId pool_for(self, uint64_t stream) except *:
        """The pool of the capture that a stream has joined, in whichever thread; or the default pool."""
        if self.private_pools.open_captures.get():
            mine = self.fences.source.capture_id(stream)
            for begun_on, name in self.pool_uses.captures() if mine else ():
                if self.fences.source.capture_id(begun_on) == mine:
                    return id_of(name)
        return default_pool()
