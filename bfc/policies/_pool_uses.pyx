"""Who uses the private pools, for threads that do not hold the lock: a part of `CachingAllocator`."""

cimport cython
from libc.stdint cimport int64_t
from libcpp.vector cimport vector

from bfc.allocators._lock cimport Lock, acquire_lock
from bfc.policies._private_pools cimport PoolId, PrivatePools, Scope, put_or_take

from bfc.errors import out_of_host_memory


cdef tuple name_of(PoolId id):
    return id.first, id.second


@cython.final
@cython.no_gc_clear
cdef class PoolUses:
    """References to private pools, and the scopes that divert allocations into them."""

    cdef int stand_behind(self, Lock* lock, PrivatePools private_pools) except -1:
        """Takes the allocator's lock, which must live as long, and its pools."""
        self.lock = lock
        self.private_pools = private_pools
        return 0

    cdef int add_reference(self, PoolId id) except -1:
        """Adds a reference to a pool, and makes the pool if it is new."""
        acquire_lock(self.lock[0])
        cdef bint added = self.private_pools.use(id)
        self.lock.release()
        if not added:
            raise out_of_host_memory()
        return 0

    cdef int release_reference(self, PoolId id) except -1:
        acquire_lock(self.lock[0])
        cdef bint held = self.private_pools.release(id)
        self.lock.release()
        if not held:
            raise RuntimeError(f"pool {name_of(id)} was released already, or never made")
        return 0

    cdef int64_t count_references(self, PoolId id) except -1:
        """How many references a pool has; 0 if it is not known."""
        acquire_lock(self.lock[0])
        cdef int64_t uses = self.private_pools.uses(id)
        self.lock.release()
        return max(uses, <int64_t>0)

    cdef int begin(self, Scope scope, bint strict) except -1:
        """Opens a scope, which holds a reference."""
        acquire_lock(self.lock[0])
        cdef bint is_in_use = self.private_pools.is_in_use(&scope, strict)
        self.lock.release()
        if is_in_use:
            raise RuntimeError(f"pool {name_of(scope.pool)} is in use already: end that use first")
        self.add_reference(scope.pool)
        acquire_lock(self.lock[0])
        cdef bint added = self.private_pools.begin(scope)
        self.lock.release()
        if not added:
            self.release_reference(scope.pool)
            raise out_of_host_memory()
        return 0

    cdef int end(self, PoolId id) except -1:
        """Closes a scope; its reference stays."""
        acquire_lock(self.lock[0])
        cdef bint found = self.private_pools.end(id)
        self.lock.release()
        if not found:
            raise RuntimeError(f"pool {name_of(id)} is not in use in this thread")
        return 0

    cdef int set_among(self, vector[PoolId]* ids, PoolId id, bint wanted) except -1:
        """Puts a pool on a list of pools, or takes it off."""
        acquire_lock(self.lock[0])
        cdef bint is_kept = put_or_take(ids[0], id, wanted)
        self.lock.release()
        if not is_kept:
            raise out_of_host_memory()
        return 0
