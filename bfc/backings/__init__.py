"""What memory lies behind an allocator's chunks. A new kind of memory is added here.

An allocator has one backing or several, and asks them in order. A request is placed in free memory
of the first that has some. If none has, the first that serves it grows, after the others have made
room. What else a miss does is the policy's: `place_after_miss` in `policies/`. In order:

_backing.pyx    the verbs of a backing, and how a request goes through those of its allocator
_pages.pyx      pages that are mapped one by one, and stitched
_ranges.pyx     PyTorch's expandable segments
_regions.pyx    blocks from the sub-allocator, also those that sleep with a tag
"""
