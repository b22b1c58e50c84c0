class Growth:
    """How large the next region is, if the limit allows it: doubling from a first size (TensorFlow's behaviour,
    2.4).
    """

    def __init__(self, first_size: int) -> None: ...
    @property
    def next_region_size(self) -> int: ...
