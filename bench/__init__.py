"""Measurements. Each module runs as `python -m bench.NAME` and prints min, median and max."""
