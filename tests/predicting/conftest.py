"""Tests of predictions. `make test-predict` runs them, in an environment of their own: they need
torch, which the other tests do without."""

from __future__ import annotations

import os

if os.environ.get("BFC_TEST_TORCH") != "1":
    collect_ignore_glob = ["test_*.py"]
