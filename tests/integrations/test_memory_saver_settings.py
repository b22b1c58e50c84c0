"""What the environment says to torch_memory_saver: followed, or said in words."""

from __future__ import annotations

import sys
import warnings

import pytest

from bfc.integrations import torch_memory_saver


def warned(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[str]:
    monkeypatch.delitem(sys.modules, "torch_memory_saver", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_memory_saver.stand_in()
    monkeypatch.delitem(sys.modules, "torch_memory_saver")
    return [str(it.message) for it in caught]


def test_what_is_not_followed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warned(monkeypatch, TMS_INIT_ENABLE="0", TMS_INIT_CPU_BACKUP_BACKEND="mmap") == []
    (said,) = warned(monkeypatch, TMS_INIT_ENABLE="1")
    assert "TMS_INIT_ENABLE is not followed under bfc" in said
    assert "region" in said
    said = warned(monkeypatch, TMS_INIT_ENABLE="no", TMS_RETAIN_CPU_BACKUP="TRUE")[0]
    assert "TMS_RETAIN_CPU_BACKUP is not followed under bfc" in said


def test_the_package_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_INIT_ENABLE", "1")
    monkeypatch.setitem(sys.modules, "torch_memory_saver", sys)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_memory_saver.stand_in()
    assert sys.modules["torch_memory_saver"] is sys
