class Pages:
    """The pages of a pool, and the views stitched from them."""
