"""Comparisons with compiled originals: `make peers`, and `make peers-nightly` for the nightly."""

from __future__ import annotations

import os

if os.environ.get("BFC_TEST_NIGHTLY") != "1":  # its wheel is 645 MB, and goes from the index
    collect_ignore = ["test_tensorflow_nightly.py"]
