"""What both policies share: a pool behind a lock, on top of a sub-allocator. In order:

_places.pyx         the places of plans in a pool: what comes, goes or is asked for off the plan
_changes.pyx        changes of a pool that few requests need: frees with a count, growth, addresses
_pages.pyx          pages that have several addresses
_lock.pxd           the lock around a pool
_private_pools.pyx  private pools: who uses them, and the scopes that divert requests into them
_reasons.pxd        why a call has more to do than ask the pool
_reading.pyx        what can be read from a pool: totals, pages, a snapshot's columns, faults
_source.pyx         a sub-allocator behind a limit: what is asked of it, and what goes back
_recorder.pyx       what a history writes down, and what PyTorch's policy counts
_fences.pyx         marks in the queues of streams, and what waits behind them; captures of graphs
_frees.pyx          frees: at once, from finalisers, after fences
_tags.pyx           which tag an allocation belongs to, and which tags sleep
mapping/            memory that is mapped to addresses: a part that an allocator may have
_plans.pyx          plans in use: steps, and the regions of plans: a part that an allocator may have
_chunk_allocator.pyx  what an allocator is made of, what a policy overrides, and what buffers ask
_plan_use.pyx       plans, as requests and users meet them
_captured.pyx       captures of graphs and scopes of pools, as requests and contexts meet them
_tagged.pyx         tags, as a user puts them to sleep and asks about them
_looking.pyx        figures and snapshots
_misses.pyx         a request, from its size to its chunk, where a hit is not enough: its steps
graph_pool.py       the memory of captured graphs
_allocator.pyx      the allocator, as a user calls it
_without_gil.pyx    for callers that must not take the GIL
replayed_pools.py   the private pools of a replay
_play.pyx           a trace, replayed in one compiled loop
"""
