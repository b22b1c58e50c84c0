from bfc.policies._stitching import Stitching

class SleepingPages(Stitching):
    """Pages of which those of a tag can sleep."""
