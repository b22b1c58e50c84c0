"""Memory that is mapped to addresses: how it is made, mapped, unmapped and given back. It is a
part that an allocator may have, and never calls the allocator. In order:

host_copy.py           what sleeping memory held
_address_ranges.pyx    ranges of addresses, and the transactions of all memory that is mapped
_blocks.pyx            regions of private pools that sleep with a tag
_sleep.pyx             sleep and wake: memory that goes and comes back while its addresses stay
_expandable.pyx        PyTorch's expandable segments: which addresses of a range get memory
_stitching.pyx         pages that may have several addresses, mapped end to end for one request
_plan_ranges.pyx       the regions of plans, which get their pages when they are touched
"""
