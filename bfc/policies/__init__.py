"""The policies: where a request may look, and what is tried where nothing fits. In order:

_growth.pyx            how TensorFlow's regions grow, and what is asked for after a refusal
_recorder.pyx          what a history writes down, and what PyTorch's policy counts
_observers.pyx         functions that PyTorch's policy calls before memory is asked for or refused
_deferred.pyx          frees in a scope with `strict`, whose fences are asked for after the scope
_private_pools.pyx     who uses PyTorch's private pools, and what is diverted into them
_pool_uses.pyx         references to private pools, and the scopes that divert into them
_releasing.pyx         which regions PyTorch's policy gives back
_mapper.pyx            who calls a sub-allocator to map memory, one thread at a time
stash.py               what sleeping memory held
_sleep.pyx             sleep and wake: memory that goes and comes back while its addresses stay
_expandable.pyx        PyTorch's expandable segments: memory that is mapped into ranges of addresses
_emptying.pyx          what goes back where there are expandable segments
_page_mapper.pyx       pages that may have several addresses: made, mapped, given back
_stitching.pyx         pages that lie apart, mapped end to end for one request
_sleeping_pages.pyx    pages with several addresses, while they sleep
_paged.pyx             what both policies do beside their placement: a history, and mapped pages
_bfc.pyx               TensorFlow's best fit with coalescing
_caching.pyx           PyTorch's caching policy
mem_pool.py            private pools of PyTorch's policy
device_allocator.py    an allocator on each OpenCL device, for a framework's back end
"""
