"""C++ headers: structures and locks on the hottest paths, each with few functions.

Only `gil_wait.hpp`, `py_int.hpp`, `quick_methods.hpp` and `turns.hpp` know Python, and none
knows an allocator. In order:

    debug.h             assertions: none, cheap ones, or all
    memory.hpp          hints to the system about memory that will soon be touched
    nothrow.hpp         containers that answer False where the host has no memory
    nothrow.pxd         the same, for Cython
    reasons.hpp         why a call of an allocator has more to do than ask the pool
    parts.hpp           what lies inside a pool as a value, declared
    pending_frees.hpp   frees that were left to a later call
    stream_uses.hpp     which streams use an allocation, for callers without the GIL
    stream_queues.hpp   what was freed and waits for streams
    lock.hpp            the lock of an allocator
    owner_scopes.hpp    scopes of owners and tags, for threads without the GIL
    gil_wait.hpp        waiting for that lock, or for the GIL
    number_map.hpp      a map of numbers that come from a file
    py_int.hpp          plain ints, read without calling Python
    quick_methods.hpp   a function in front of a method, for its plainest call
    turns.hpp           turns at an object, where no GIL keeps others away
    turns.pxd           the same, for Cython
    pages.hpp           pages that a driver can register
    forward.hpp         the names of what stands behind pointers
    bins.hpp            free chunks by size and order
    region_numbers.hpp  which region came first
    starts.hpp          chunks in use by address
    pool_sets.hpp       the sets of bins of a private pool
    pool_parts.hpp      the fields of a pool, by subject
    allocator_parts.hpp  the fields of an allocator, by subject
    torch_sizes.hpp     PyTorch's arithmetic of sizes
    owners.hpp          bytes in use by owner
    usage.hpp           what PyTorch counts
    pool_usage.hpp      and what it counts of each private pool
    history.hpp         what PyTorch writes down
    columns.hpp         the rows of a snapshot
    timeline.hpp        the figures of a replay over time
    occupancy.hpp       which addresses a trace used when
    history_rewind.hpp  which part of a history PyTorch's viewer can follow
    pickle.hpp          pickles, written without Python objects
    page_bitmap.hpp     the slots of a range whose pages may have further addresses
    stitched_views.hpp  pages that have several addresses, and the views stitched from them
    ranges.hpp          where a request looks in regions and in ranges at once
    sort.hpp            orders of chunks and of sets of bins
    pool_ids.hpp        ids of private pools; numbers of threads
    plan_layout.hpp     places for blocks whose lives are known
    plan_search.hpp     the same exactly, for a few hundred blocks
    plan_sweep.hpp      whether two blocks of a layout overlap
    plan_matcher.hpp    which slot of a plan a request is for
    plan_server.hpp     which places of a plan are taken, and room for guests
    source.h            a sub-allocator's calls as C functions
    mapping.pxd         those that map memory (include/bfc_mapping.h), for Cython
    mapped_ranges.hpp   an allocator's ranges of addresses, its pages, and what guards their records
    mapping_books.hpp   where the pages of a sub-allocator are mapped
    mapping_books.pxd   the same, for Cython
    fake_device.hpp     a device that PyTorch asks, for tensors that are only shapes
    dlpack.h            DLPack's structures
"""
