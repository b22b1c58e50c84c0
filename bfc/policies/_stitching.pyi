from bfc.policies._page_mapper import PageMapper

class Stitching(PageMapper):
    """What a request does that no free chunk fits."""
