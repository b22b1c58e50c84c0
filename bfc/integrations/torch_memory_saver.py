"""The calls of `torch_memory_saver`, answered by tags of the pools that serve PyTorch.

Under `bfc run` and after `bfc.integrations.torch.install()`, `import torch_memory_saver` finds this
module, unless that package was imported before. Memory of a region belongs to a tag of the pool, so
`pause` and `resume` work beside expandable segments, stitching and plans, and nothing is preloaded.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bfc.allocators._tagged import kept_contents
from bfc.allocators.mapping.host_copy import Reuse
from bfc.integrations._by_tag import ByTag, serving_pool
from bfc.integrations._shared import client

_LIBRARY = "torch_memory_saver"


class TorchMemorySaver:
    """What `torch_memory_saver.torch_memory_saver` is: regions of memory that can be paused.

    Attributes
    ----------
    enabled : bool
        True.
    """

    enabled = True

    def __init__(self) -> None:
        self._by_tag = ByTag(_LIBRARY)
        self._ways: dict[str, dict[Any, str]] = {}  # by tag and by way: its tag in the pool
        self._folder = os.environ.get("TMS_DISK_BACKUP_DIR")
        self._retains = _is_set("TMS_RETAIN_CPU_BACKUP")
        self._reused: dict[str, Reuse] = {}  # by way: what contents on the host are kept in

    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> AbstractContextManager[None]:
        """Enter a region: what this thread allocates can be paused by its tag.

        Parameters
        ----------
        tag : str, optional
            Its name.
        enable_cpu_backup : bool, optional
            Keep its contents on the host while it is paused.
        enable_disk_backup : bool, optional
            Keep them in files, in the folder of `set_disk_backup_dir`.
        cpu_backup_backend : {"pinned", "mmap"}, optional
            Pinned memory of the host, or ordinary memory. The default is what
            TMS_INIT_CPU_BACKUP_BACKEND says, else pinned memory.

        Returns
        -------
        context manager
            For a `with` block.

        Raises
        ------
        ValueError
            If the arguments contradict each other.
        """
        if cpu_backup_backend not in (None, "pinned", "mmap"):
            raise ValueError(
                f"cpu_backup_backend is 'pinned' or 'mmap', not {cpu_backup_backend!r}"
            )
        if cpu_backup_backend is not None and not enable_cpu_backup:
            raise ValueError("cpu_backup_backend needs enable_cpu_backup=True")
        if enable_cpu_backup and enable_disk_backup:
            raise ValueError("contents are kept on the host or on the disk: name one of the two")
        way = _way(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        return self._by_tag.scope(self._named(tag, way))

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Capture a graph, as `torch.cuda.graph` does, whose memory can be paused.

        Parameters
        ----------
        cuda_graph : torch.cuda.CUDAGraph
            The graph.
        pool, stream, capture_error_mode : object
            Arguments of `torch.cuda.graph`.
        tag : str, optional
            As of `region`, with the arguments that follow.
        enable_cpu_backup : bool, optional
            As of `region`.
        cpu_backup_backend : str, optional
            As of `region`.

        Yields
        ------
        None
            While it is captured.
        """
        cuda: Any = client("torch", "torch").cuda
        captured = cuda.graph(
            cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode
        )
        with self.region(tag, enable_cpu_backup, False, cpu_backup_backend), captured:
            yield

    def disable(self) -> AbstractContextManager[None]:
        """Enter a scope whose memory cannot be paused, inside of a region.

        Returns
        -------
        context manager
            For a `with` block.
        """
        return self._by_tag.scope(None)

    def pause(self, tag: str | None = None) -> None:
        """Give the memory of a tag back to the device. Its addresses stay.

        Parameters
        ----------
        tag : str, optional
            Which one; None is all.
        """
        keep: dict[str, Any] = {}
        for ways in self._ways.values():
            keep |= {name: self._kept_in(way) for way, name in ways.items() if way is not None}
        self._by_tag.sleep(self._names(tag), keep)

    def resume(self, tag: str | None = None) -> None:
        """Give a tag its memory back, at the same addresses, and its contents if they were kept.

        Parameters
        ----------
        tag : str, optional
            Which one; None is all.

        Raises
        ------
        torch.OutOfMemoryError
            If there is no room. Then it stays paused, and the call can be repeated.
        """
        with self._by_tag.margin_off():
            self._by_tag.wake(self._names(tag))

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """Read what is kept of a tensor that is paused.

        Parameters
        ----------
        x : torch.Tensor
            A contiguous one on a GPU.
        zero_copy : bool, optional
            Is accepted: it is a copy in any case.

        Returns
        -------
        torch.Tensor or None
            On the CPU; None where nothing is kept, or it is not paused.
        """
        torch: Any = client("torch", "torch")
        if not x.is_cuda or not x.is_contiguous():
            raise ValueError("get_cpu_backup takes a contiguous tensor on a GPU")
        if not x.nbytes:
            return None
        held = kept_contents(serving_pool(_LIBRARY, x.device.index), x.data_ptr(), x.nbytes)
        if held is None:
            return None
        return torch.frombuffer(held, dtype=x.dtype).view(x.shape)

    def set_disk_backup_dir(self, path: str) -> None:
        """Choose the folder of `enable_disk_backup`, and make it.

        Parameters
        ----------
        path : str
            The folder.
        """
        os.makedirs(path, exist_ok=True)
        self._folder = path

    @property
    def hook_mode(self) -> str:
        """How memory is found: always by PyTorch's allocator. What is set is ignored."""
        return "torch"

    @hook_mode.setter
    def hook_mode(self, hook_mode: str) -> None: ...

    @property
    def memory_margin_bytes(self) -> int:
        """Of each device, what a pool leaves free when it takes new memory; 0 at first. `resume`
        may take more, and memory in no region is bounded, too."""
        return self._by_tag.margin

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._by_tag.keep_margin(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether `resume` leaves the host's memory for the next `pause`, as TMS_RETAIN_CPU_BACKUP
        says at first. It is given back by a `resume` while this is False."""
        return self._retains

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._retains = bool(value)
        for reused in self._reused.values():
            reused.keeps = self._retains

    def _named(self, tag: str, way: str | None) -> str:
        """The tag in the pool: memory of one tag that is kept in two ways has two."""
        ways = self._ways.setdefault(tag, {})
        return ways.setdefault(way, f"{tag} ({way or 'dropped'})" if ways else tag)

    def _kept_in(self, way: str) -> Any:
        """Where the pool is to keep contents."""
        if way == "disk":
            return self._file
        if way not in self._reused:
            self._reused[way] = Reuse(way, serving_pool(_LIBRARY).sub_allocator)
            self._reused[way].keeps = self._retains
        return self._reused[way]

    def _follow_environment(self) -> None:
        """Has all memory in a region, where TMS_INIT_ENABLE says so."""
        if _is_set("TMS_INIT_ENABLE"):
            to_host, to_disk = (_is_set(f"TMS_INIT_ENABLE_{it}_BACKUP") for it in ("CPU", "DISK"))
            self._by_tag.cover(self._named("default", _way(to_host, to_disk and not to_host)))

    def _names(self, tag: str | None) -> list[str]:
        chosen = self._ways.values() if tag is None else [self._ways.get(tag, {})]
        return [name for ways in chosen for name in ways.values()]

    def _file(self, nbytes: int) -> mmap.mmap:
        """Memory in a file that is gone with its last mapping."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # else a full disk ends the process later
            return mmap.mmap(file.fileno(), nbytes)


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


def _way(to_host: bool, to_disk: bool, backend: str | None = None) -> str | None:
    """What becomes of contents: None drops them."""
    if to_host:
        return "host" if (backend or _backend()) == "mmap" else "pinned"
    return "disk" if to_disk else None


def _backend() -> str:
    """Where contents are kept by default."""
    chosen = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND") or "pinned"
    if chosen not in ("pinned", "mmap"):
        raise ValueError(f"TMS_INIT_CPU_BACKUP_BACKEND is 'pinned' or 'mmap', not {chosen!r}")
    return chosen


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Have processes that are started meanwhile be served by bfc, as `bfc run` does.

    Yields
    ------
    None
        While the environment of this process says so.
    """
    before = {name: os.environ.get(name) for name in ("BFC_RUN", "PYTHONPATH")}
    spec = find_spec("bfc_tools")
    assert spec is not None
    assert spec.origin is not None
    startup = str(Path(spec.origin).parent / "startup")
    path = [it for it in (before["PYTHONPATH"] or "").split(os.pathsep) if it not in ("", startup)]
    os.environ["PYTHONPATH"] = os.pathsep.join([startup, *path])
    os.environ.setdefault("BFC_RUN", "caching:stitch")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def stand_in() -> None:
    """Have `import torch_memory_saver` find this module, unless the package was imported, and
    follow the package's settings in the environment."""
    if sys.modules.setdefault(_LIBRARY, sys.modules[__name__]) is sys.modules[__name__]:
        torch_memory_saver._follow_environment()


#: The one of this process.
torch_memory_saver = TorchMemorySaver()
