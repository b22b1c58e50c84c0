"""The version of bfc, below all that shows it."""

__version__ = "0.1.0"
