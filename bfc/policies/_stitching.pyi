from bfc.policies._page_mapper import PageMapper

class Stitching(PageMapper):
    """What is done for a request that no free chunk fits."""
