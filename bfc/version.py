"""The version of bfc, below all that shows it."""

__version__ = "1.0.0"
