"""vLLM's sleep mode on the tags of a pool of bfc.

Where such a pool serves PyTorch, `register` puts `Allocator` in the place of vLLM's
`CuMemAllocator`, so that `LLM.sleep()`, `LLM.wake_up()` and their HTTP calls put tags to sleep. It
also registers the sleep-mode back end "bfc": where vLLM's configuration names that, a pool takes
the place of PyTorch's allocator. vLLM calls it in each of its processes: it is an entry point of
`vllm.general_plugins`.
"""

from __future__ import annotations

import functools
import gc
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from bfc.integrations import _torch_cuda
from bfc.integrations._by_tag import ByTag, serving_pool
from bfc.integrations._shared import client

#: What vLLM keeps at every level of sleep, beside the weights at level 1.
_KEPT = ("runtime", "cudagraph")
#: Set to 1 where the configuration has named the back end "bfc": processes that vLLM starts take
#: over, too.
_CHOSEN = "BFC_VLLM"


class Allocator:
    """The calls of vLLM's `CuMemAllocator`, of which a process has one.

    Notes
    -----
    Contents are kept in pinned memory of the host, which is given back at waking.
    """

    default_tag = "default"

    def __init__(self) -> None:
        self._by_tag = ByTag("vLLM's sleep mode")
        self._graph_pool: tuple[int, int] | None = None

    def use_memory_pool(self, tag: str | None = None) -> AbstractContextManager[None]:
        """Enter a tag: what this thread allocates belongs to it.

        Parameters
        ----------
        tag : str, optional
            Its name; None is "default".

        Returns
        -------
        context manager
            For a `with` block.
        """
        return self._by_tag.scope(self.default_tag if tag is None else tag)

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Enter the tag "cudagraph", in which graphs are captured.

        Yields
        ------
        tuple of (int, int)
            The pool for the graphs.
        """
        with self._by_tag.scope("cudagraph"):
            if self._graph_pool is None:
                self._graph_pool = client("torch", "torch").cuda.graph_pool_handle()
            yield self._graph_pool

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Put all tags to sleep. A tag that sleeps already is left as it is.

        Parameters
        ----------
        offload_tags : tuple of str or str, optional
            The tags whose contents are kept; None keeps those of "default".
        """
        kept = (self.default_tag,) if offload_tags is None else _names(offload_tags)
        self._by_tag.sleep(self._by_tag.tags, dict.fromkeys(kept, "pinned"))
        _empty_cache()

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Put tags to sleep without their contents.

        Parameters
        ----------
        tags : tuple of str or str
            Which ones.
        """
        self._by_tag.sleep(_names(tags), {})

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Give tags their memory back, at the same addresses.

        Parameters
        ----------
        tags : list of str, optional
            Of "weights" and "kv_cache", which ones; every other tag wakes, too. None: all.

        Raises
        ------
        torch.OutOfMemoryError
            If there is no room. Then they sleep on, and the call can be repeated.
        """
        _empty_cache()
        self._by_tag.wake(tag for tag in self._by_tag.tags if _is_wanted(tag, tags))

    def get_current_usage(self) -> int:
        """Count what lives in the tags.

        Returns
        -------
        int
            Bytes, awake or asleep.
        """
        return self._by_tag.bytes_in_use()

    def release_pools(self) -> None:
        """Do nothing: the memory goes with its tensors. vLLM calls this at its end."""

    close = release_pools


def register() -> None:
    """Register the back end "bfc", and put `Allocator` in the place of vLLM's.

    Warns
    -----
    RuntimeWarning
        If bfc was chosen, and PyTorch has used CUDA already in this process.

    Notes
    -----
    It takes PyTorch's allocator over, as `bfc.integrations.torch.install` does, only where vLLM is
    configured with `sleep_mode_backend="bfc"`, or VLLM_PLUGINS names "bfc"; under `bfc run` that
    was done before. Otherwise vLLM's own stays.
    """
    factory = client("vllm.device_allocator.sleep_mode_backend", "vllm").SleepModeBackendFactory
    if "bfc" not in factory._registry:
        factory.register_backend("bfc", __name__, "Backend")
    names = os.environ.get("VLLM_PLUGINS", "").split(",")
    if _torch_cuda.serving() is not None or "bfc" in names or os.environ.get(_CHOSEN) == "1":
        _install()
    else:
        _install_once_configured()


def _install() -> None:
    """Has a pool serve PyTorch in this process, and `Allocator` answer vLLM's calls."""
    torch = client("torch", "torch")
    if _torch_cuda.serving() is None:
        if torch.cuda.is_initialized():
            warnings.warn(
                "bfc was chosen for vLLM, but PyTorch has used CUDA already in this process: "
                "vLLM's own allocator serves it. Start it with `bfc run`",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        settings = _torch_cuda.settings_of_environment()
        _torch_cuda.take_over(torch, _torch_cuda.stitching(torch, settings))
    theirs = client("vllm.device_allocator.cumem", "vllm").CuMemAllocator
    if not isinstance(theirs.instance, Allocator):
        theirs.instance = Allocator()


def _install_once_configured() -> None:
    """Has bfc take over where a configuration of vLLM's names the back end "bfc": nothing else of
    vLLM's reads the name before it has used CUDA. A process that vLLM forks has the pool, and one
    that it spawns finds the variable."""
    config: Any = client("vllm.config.model", "vllm").ModelConfig
    configured = config.__post_init__
    if hasattr(configured, "_of_bfc"):
        return

    @functools.wraps(configured)
    def look(self: Any, *arguments: Any, **named: Any) -> None:
        if self.enable_sleep_mode and self.sleep_mode_backend == "bfc":
            os.environ[_CHOSEN] = "1"
            _install()
        configured(self, *arguments, **named)

    look._of_bfc = True  # type: ignore[attr-defined]
    config.__post_init__ = look


def _names(tags: Iterable[str] | str) -> tuple[str, ...]:
    return (tags,) if isinstance(tags, str) else tuple(tags)


def _is_wanted(tag: str, tags: list[str] | None) -> bool:
    return tags is None or tag in tags or tag not in ("weights", "kv_cache")


def _empty_cache() -> None:
    gc.collect()
    client("torch", "torch").accelerator.empty_cache()  # as vLLM's own


def _make_backend() -> type:
    """The class of the back end "bfc": vLLM's base class is there only where vLLM is."""
    base: Any = client("vllm.device_allocator.sleep_mode_backend", "vllm").SleepModeBackend

    class Backend(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            serving_pool('the sleep-mode back end "bfc"')

        def suspend(self, level: int = 1) -> None:
            kept = ("weights", *_KEPT) if level == 1 else _KEPT
            _instance().sleep(offload_tags=kept)
            self._state = "SUSPENDED"

        def resume(self, tags: list[str] | None = None) -> None:
            self._state = "RESUMING"
            _instance().wake_up(tags)
            self._state = "RUNNING"

        def discard(self, tags: tuple[str, ...]) -> None:
            _instance().discard(tags)
            self._state = "SUSPENDED"

        @classmethod
        def preserves_communicators(cls) -> bool:
            return True

    return Backend


def _instance() -> Any:
    return client("vllm.device_allocator.cumem", "vllm").CuMemAllocator.get_instance()


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _make_backend()
