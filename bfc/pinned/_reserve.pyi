class Reserve:
    """One large block, taken at the first allocation, that smaller ones are cut from."""
