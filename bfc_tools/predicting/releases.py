"""Releases of PyTorch, and in what they differ as far as rules ask: nothing else compares versions.

What sets their allocators apart is in `bfc.pytorch.rules`. The cuDNN, and the CUDA that a release
is compiled for, are those of PyTorch's own wheels, which the metadata of these names. Each other
field was found in the sources of two releases, or seen on a GPU: the comment says where.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TorchRelease:
    """A release of PyTorch, such as 2.13; its patches are alike."""

    version: tuple[int, int]
    cudnn: int  # 91900 is 9.19
    cuda: int  # 13
    #: CCCL's, which comes with CUDA, and has CUB.
    cccl: int
    #: The compute capabilities, 9 for 9.0, whose workspace of cuBLAS is large
    #: (ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize).
    large_workspaces: tuple[int, ...]
    #: Whether workspaces of cuBLAS are kept, unless TORCH_CUBLAS_WORKSPACE_CACHE says so (the
    #: same file).
    keeps_workspaces: bool
    #: Whether cublasLt works in that of cuBLAS, unless TORCH_CUBLASLT_UNIFIED_WORKSPACE says
    #: otherwise (ATen/cuda/CUDABlas.cpp).
    unifies_workspaces: bool
    #: Whether cublasLt adds a bias to a single row, too, as an H100 shows. Newer sources exclude
    #: that, which no recording has confirmed (ATen/native/cuda/Blas.cpp).
    adds_bias_to_one_row: bool
    #: Whether volumes in 16 bits are left to cuDNN (pull requests 163581 and 166480).
    trusts_cudnn_with_volumes: bool
    #: Whether `topk` keeps a sum for each digit, and needs no semaphores: as on an H100
    #: (ATen/native/cuda/TensorTopK.cu).
    sums_digits: bool
    #: Whether few segments of many rows are added to an embedding's gradient without a buffer for
    #: them (pull request 172454).
    adds_segments_at_once: bool
    #: Whether cuDNN's attention is preferred on all of 9.x and 10.x, and not on 9.0, 9.3, 10.0 and
    #: 10.3 alone (ATen/native/transformers/cuda/sdp_utils.cpp).
    prefers_cudnn_on_all: bool
    #: Whether dropout that is finer than a sixteenth is not left to cuDNN's attention (the same
    #: file, check_cudnn_dropout). 2.11 has taken cuDNN's kernel for 0.1 on an H200.
    keeps_fine_dropout: bool
    #: Whether cuDNN's attention takes heads of 256 on a GPU of 9.0 whatever cuDNN there is (the
    #: same file).
    gives_cudnn_large_heads: bool
    #: Whether tensors of three dimensions get a batch of one for attention's kernels
    #: (ATen/native/transformers/sdp_utils_cpp.h, normalize_unbatched_input).
    attends_without_batch: bool
    #: Whether the memory-efficient kernel knows heads that share keys and values
    #: (ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h, q_heads_per_kv), and
    #: whether its seed and offset lie on the GPU if nothing is dropped: 2.15 has them there on the
    #: emulated driver, 2.11 has not. Those who measured 2.14 had them (issue 197838).
    shares_heads_efficiently: bool
    #: Whether one head of keys and values is that of all queries without `enable_gqa`
    #: (sdp_utils_cpp.h, supports_mqa). PyTorch 2.15 itself says so of these three.
    shares_one_head: bool
    #: Whether collectives know fake tensors without being told (torch/distributed/_tools).
    has_fake_collectives: bool
    #: The virtual functions of a device's guard, in their order, without its destructors
    #: (c10/core/impl/DeviceGuardImplInterface.h).
    guard: tuple[str, ...]
    #: How many virtual functions the hooks of CUDA have (ATen/detail/CUDAHooksInterface.h).
    hooks: int

    @property
    def name(self) -> str:
        """As PyTorch calls it: "2.13"."""
        return "{}.{}".format(*self.version)


_GUARD = (
    *("type", "exchangeDevice", "getDevice", "setDevice", "uncheckedSetDevice"),
    *("getStream", "getDefaultStream", "getStreamFromGlobalPool", "getNewStream"),
    *("exchangeStream", "destroyEvent", "record", "block", "queryEvent", "deviceCount"),
    *("queryStream", "synchronizeStream", "synchronizeEvent", "synchronizeDevice"),
    *("recordDataPtrOnStream", "elapsedTime"),
)


def _with(guard: tuple[str, ...], name: str, before: str) -> tuple[str, ...]:
    """A guard with one more function, in front of another."""
    place = guard.index(before)
    return (*guard[:place], name, *guard[place:])


_2_9 = TorchRelease(
    version=(2, 9),
    cudnn=91002,
    cuda=12,
    cccl=2,
    large_workspaces=(9,),
    keeps_workspaces=True,
    unifies_workspaces=False,
    adds_bias_to_one_row=True,
    trusts_cudnn_with_volumes=False,
    sums_digits=False,
    adds_segments_at_once=False,
    prefers_cudnn_on_all=False,
    keeps_fine_dropout=False,
    gives_cudnn_large_heads=True,
    attends_without_batch=False,
    shares_heads_efficiently=False,
    shares_one_head=False,
    has_fake_collectives=False,
    guard=_GUARD,
    hooks=46,
)
_2_10 = replace(
    _2_9,
    version=(2, 10),
    trusts_cudnn_with_volumes=True,
    guard=_with(_2_9.guard, "getDeviceCapability", before="queryStream"),
    hooks=47,
)
_2_11 = replace(
    _2_10,
    version=(2, 11),
    cudnn=91900,
    cuda=13,
    cccl=3,
    sums_digits=True,
    adds_segments_at_once=True,
    prefers_cudnn_on_all=True,
    has_fake_collectives=True,
    guard=_with(_2_10.guard, "getStreamNativeHandle", before="destroyEvent"),
    hooks=48,
)
_2_12 = replace(
    _2_11,
    version=(2, 12),
    cudnn=92000,
    large_workspaces=(9, 10, 12),
    unifies_workspaces=True,
    adds_bias_to_one_row=False,
    keeps_fine_dropout=True,
    gives_cudnn_large_heads=False,
    guard=_with(_2_11.guard, "isStreamCapturing", before="synchronizeEvent"),
)
_2_13 = replace(_2_12, version=(2, 13))
_2_14 = replace(
    _2_13,
    version=(2, 14),
    cudnn=92400,
    attends_without_batch=True,
    shares_heads_efficiently=True,
    shares_one_head=True,
)
_2_15 = replace(
    _2_14,
    version=(2, 15),
    cudnn=92600,
    large_workspaces=(9, 10, 12, 11),
    keeps_workspaces=False,
)

#: The releases that are known, the oldest first.
RELEASES = (_2_9, _2_10, _2_11, _2_12, _2_13, _2_14, _2_15)
OLDEST, NEWEST = RELEASES[0], RELEASES[-1]


def release_of(version: tuple[int, ...]) -> TorchRelease:
    """The release of a version, such as (2, 14, 1). Of one that is newer than all, what is known of
    the newest; of one that is older than all, what is known of the oldest.

    >>> release_of((2, 14, 1)).cudnn, release_of((2, 99)).name
    (92400, '2.15')
    """
    older = [one for one in RELEASES if one.version <= version[:2]]
    return older[-1] if older else OLDEST


#: What differs between two releases, in a user's words.
WORDS = {
    "cudnn": "the version of cuDNN",
    "cccl": "the temporary storage of CUB",
    "large_workspaces": "the size of cuBLAS's workspace",
    "keeps_workspaces": "how long workspaces of cuBLAS are kept",
    "unifies_workspaces": "the workspace of cublasLt",
    "adds_bias_to_one_row": "products with a bias",
    "trusts_cudnn_with_volumes": "convolutions of volumes in 16 bits",
    "sums_digits": "topk",
    "adds_segments_at_once": "the gradient of embeddings",
    **dict.fromkeys(
        (
            *("prefers_cudnn_on_all", "keeps_fine_dropout", "gives_cudnn_large_heads"),
            *("attends_without_batch", "shares_heads_efficiently", "shares_one_head"),
        ),
        "which kernel attention takes",
    ),
}


def differences(one: TorchRelease, other: TorchRelease) -> list[str]:
    """In what rules of two releases differ.

    >>> differences(release_of((2, 12)), release_of((2, 13)))
    []
    >>> differences(release_of((2, 13)), release_of((2, 14)))
    ['the version of cuDNN', 'which kernel attention takes']
    """
    differ = (words for name, words in WORDS.items() if getattr(one, name) != getattr(other, name))
    return list(dict.fromkeys(differ))


def parsed(text: str) -> tuple[int, int]:
    """The release that a text names, such as "2.9" or "2.9.1". Raises ValueError if it names none,
    or one that is older than all that are known.

    >>> parsed("2.9.1")
    (2, 9)
    """
    found = re.fullmatch(r"v?(\d+)\.(\d+)([.+].*)?", text)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < OLDEST.version:
        raise ValueError(
            f"{text!r} is no PyTorch whose rules are known: write one from {OLDEST.name} on, such "
            f"as {NEWEST.name}"
        )
    return version
