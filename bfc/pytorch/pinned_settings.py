"""The settings of PyTorch's allocator of pinned host memory.

PyTorch's behaviour, 4.5, describes them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from bfc.pytorch.grammar import FIXED, KINDS, Fixed, Keys, read_fields
from bfc.pytorch.rules import NEWEST
from bfc.pytorch.sizes import LARGE_SEGMENT


@dataclass(frozen=True)
class PinnedSettings:
    """The pinned_* settings of PyTorch, as a `PinnedAllocator` takes them.

    One text can serve both allocators: the keys of `CachingSettings` are checked here, and ignored.

    Attributes
    ----------
    text : str
        The last text that was applied.
    pinned_use_cuda_host_register : bool
        Pin pages of the operating system (cuMemHostRegister) rather than ask for pinned ones.
    pinned_num_register_threads : int
        How many threads touch such pages before they are pinned.
    pinned_reserve_segment_size : int
        In bytes. The block that is allocated first, and that small requests are cut from.
    pinned_max_round_threshold : int or None
        In bytes. Larger requests are not rounded; None is unlimited.
    pinned_max_cached_size : int or None
        In bytes. Larger blocks are not kept; None is unlimited.

    Examples
    --------
    >>> settings = PinnedSettings().apply("pinned_max_round_threshold_mb:128, max_split_size_mb:40")
    >>> settings.round_size(40_960), settings.round_size(150 << 20) >> 20
    (65536, 150)
    """

    text: str = ""
    pinned_use_cuda_host_register: bool = False
    pinned_num_register_threads: int = 1
    pinned_reserve_segment_size: int = 0
    pinned_max_round_threshold: int | None = None
    pinned_max_cached_size: int | None = None

    def apply(self, text: str, strict: bool = False, *, torch: str = NEWEST) -> PinnedSettings:
        """The settings after a text. Those that it does not name stay.

        Parameters
        ----------
        text : str
            What PyTorch takes in PYTORCH_CUDA_ALLOC_CONF.
        strict : bool, optional
            As in `CachingSettings.apply`.
        torch : str, optional
            The version of PyTorch. 2.13 is the first with pinned_max_round_threshold_mb and
            pinned_max_cached_size_mb.

        Returns
        -------
        PinnedSettings
            New ones.

        Raises
        ------
        SettingsError
            If something is unknown, malformed, repeated or out of range, or asks for what bfc does
            not do: pinned_use_background_threads:True or pinned_free_catch_all:True.
        TypeError
            If `text` is not a str.

        Notes
        -----
        Source: PyTorch's behaviour, 4.5.

        Examples
        --------
        >>> PinnedSettings().apply("pinned_use_background_threads:True")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        bfc.errors.SettingsError: pinned_use_background_threads: True is not possible: ...
        """
        read = read_fields(text, strict, _PINNED, LARGE_SEGMENT, torch)
        own = {field.name for field in dataclasses.fields(self)}
        changes = {name: value for name, value in read.items() if name in own}
        return dataclasses.replace(self, **changes, text=text)

    def check_version(self, torch: str) -> None:
        """Refuse these settings for a version of PyTorch that does not have all of them.

        Parameters
        ----------
        torch : str
            The version.

        Raises
        ------
        SettingsError
            If a limit is set, and the version has none. The error names the version that has it.

        Examples
        --------
        >>> PinnedSettings(pinned_max_cached_size=0).check_version("2.15")
        """
        keys = _PINNED.of_version(torch)
        for key in ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"):
            if getattr(self, KINDS[key].field) is not None and not keys.has(key):
                raise keys.unknown(key)

    def round_size(self, nbytes: int) -> int:
        """The size of the block for a request.

        Parameters
        ----------
        nbytes : int
            The request in bytes, at least 1.

        Returns
        -------
        int
            The next power of two; `nbytes` itself above either limit.

        Examples
        --------
        >>> PinnedSettings().round_size(81_920)
        131072
        """
        limits = (self.pinned_max_round_threshold, self.pinned_max_cached_size)
        if all(limit is None or nbytes <= limit for limit in limits):
            return 1 << (nbytes - 1).bit_length()
        return nbytes


_PINNED_FIXED = {
    "pinned_use_background_threads": Fixed(
        "False",
        "True",
        "bfc starts no threads; each allocation asks the oldest event itself",
        "larger or fewer requests, if asking an event shows in a profile",
    ),
    "pinned_free_catch_all": Fixed(
        "False",
        "True",
        "bfc drops no error of a free; where nobody could catch it, it goes to sys.unraisablehook",
        "an own sys.unraisablehook, or a try around empty_cache() and close()",
    ),
}
_PINNED = Keys(
    {key: kind for key, kind in KINDS.items() if key not in _PINNED_FIXED},
    FIXED | _PINNED_FIXED,
    "pinned_max_cached_size_mb:16",
)
