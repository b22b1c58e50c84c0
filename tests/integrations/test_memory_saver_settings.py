"""What the environment says to torch_memory_saver, without PyTorch."""

from __future__ import annotations

import sys
import warnings

import pytest

from bfc.integrations import torch_memory_saver
from bfc.integrations.torch_memory_saver import TorchMemorySaver


@pytest.mark.parametrize("said", ["1", "TRUE", "yes", "0", "no", ""])
def test_whether_the_hosts_memory_is_kept(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("TMS_RETAIN_CPU_BACKUP", said)
    assert TorchMemorySaver().retain_cpu_backup is (said in ("1", "TRUE", "yes"))


def test_a_margin_needs_a_pool() -> None:
    saver = TorchMemorySaver()
    with pytest.raises(RuntimeError, match="bfc run"):
        saver.memory_margin_bytes = 1 << 30
    assert saver.memory_margin_bytes == 0


def test_the_package_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_INIT_ENABLE", "1")
    monkeypatch.setitem(sys.modules, "torch_memory_saver", sys)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_memory_saver.stand_in()
    assert sys.modules["torch_memory_saver"] is sys
