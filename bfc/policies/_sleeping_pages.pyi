from bfc.policies._stitching import Stitching

class SleepingPages(Stitching):
    """Stitched pages; those of a tag can sleep."""
