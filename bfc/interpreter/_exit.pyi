def is_exiting() -> bool:
    """Whether Python's exit has begun. From then on frees do nothing: the driver, or half of Python, may be gone.

    Returns
    -------
    bool
        False until the functions that are registered with `atexit` run.
    """
