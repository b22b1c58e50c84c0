"""What torch_memory_saver's calls do without PyTorch."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bfc.integrations.torch_memory_saver import TorchMemorySaver


def test_a_backup_on_a_disk_has_its_blocks_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing into a file with holes would end the process with SIGBUS where the disk is full."""
    saver = TorchMemorySaver()
    saver.set_disk_backup_dir(str(tmp_path))
    with saver._file(1 << 20):
        files = [os.stat(it) for it in Path("/proc/self/fd").iterdir() if _lies_in(it, tmp_path)]
        assert [it.st_size for it in files] == [1 << 20]
        assert files[0].st_blocks * 512 >= 1 << 20

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        saver._file(1 << 20)
    assert list(tmp_path.iterdir()) == []


def _lies_in(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link).startswith(str(folder))
    except OSError:  # that of the listing itself
        return False
