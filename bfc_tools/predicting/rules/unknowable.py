"""Operators whose kernels take memory that only a GPU knows, with a rough range for each: from what
public reports say and what the algorithms need, not measured.

Their names are printed once. Of all others, either a rule says what they take, or their kernels in
PyTorch's ATen/native/cuda take nothing, or what a prediction does not know: nobody has read all of
them.
"""

from __future__ import annotations

from bfc_tools.predicting.rules.operators import OPERATORS
from bfc_tools.predicting.rules.operators import unknowable as _know

_CUDNN = (
    "cuDNN's workspace depends on the algorithm that it picks. It is estimated: of 36,735 passes "
    "on an H100 with cuDNN 9.19, 75 % are within 1 MiB or 1 % of it, others take from 0 to "
    "hundreds of MiB more. Where cuDNN is installed it is asked itself, which is nearer: pip "
    "install nvidia-cudnn-cu13 nvidia-cublas. With torch.backends.cudnn.benchmark it takes up to "
    "GiBs while it tries"
)
CONVOLUTIONS = frozenset(
    (
        *("aten::convolution", "aten::_convolution", "aten::convolution_backward"),
        *("aten::cudnn_convolution", "aten::cudnn_convolution_transpose"),
    )
)
_SOLVER = (
    "cuSOLVER's workspace is counted as an H100 with CUDA 13.0 has it: within 2 % there for most "
    "sizes, within 25 % for few numbers of 64 bits"
)
_OTHER_SOLVER = "a workspace of cuSOLVER or MAGMA: about once or twice the matrices"
_FFT = (
    "cuFFT's workspace is an estimate from 60 transforms on an H100: nothing for lengths of small "
    "factors, else the signal once, and up to four times if they are long"
)
_RNN = (
    "cuDNN's reserve, which is kept for the backward pass, is counted as an H100 with cuDNN 9.19 "
    "has it, and its workspace is an estimate: within 10 % of it in nine of ten networks there"
)
_ATTENTION = (
    "cuDNN's workspace is counted as an H200 with cuDNN 9.19 has it: in the backward pass the "
    "gradient of the queries in 32 bits"
)
#: What is said of operators of others.
CUSTOM = (
    "a kernel of its own: only its results are counted, not what it allocates inside; "
    "torch.library.register_fake says what the results are"
)

_know(_CUDNN, *sorted(CONVOLUTIONS))
_know(_RNN, "aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
_know(
    _ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
)
_know(_FFT, "aten::_fft_r2c", "aten::_fft_c2c", "aten::_fft_c2r")
_know(
    _SOLVER,
    *("aten::_linalg_svd", "aten::_linalg_eigh", "aten::linalg_qr", "aten::geqrf"),
    *("aten::linalg_inv_ex", "aten::linalg_lu_factor_ex", "aten::_linalg_solve_ex"),
    *("aten::linalg_cholesky_ex", "aten::cholesky_inverse", "aten::linalg_lstsq"),
    *("aten::_linalg_det", "aten::_linalg_slogdet", "aten::linalg_householder_product"),
)
_know(_OTHER_SOLVER, "aten::linalg_ldl_factor_ex", "aten::linalg_eig")
_know(
    "temporary storage of CUB and Thrust: a few times the size of the tensor",
    *("aten::unique_dim", "aten::unique_dim_consecutive", "aten::bincount", "aten::histc"),
)
#: Where PyTorch's own operators are.
OWN = frozenset(
    (
        "aten",
        "prim",
        "prims",
        "profiler",
        "c10d",
        "_c10d_functional",
        "fsdp",
        "inductor",
        "debugprims",
    )
)


def not_asked_of(library: str) -> str:
    """What is said instead where no library could be asked that a variable names."""
    return f"{library!r} is no cuDNN 9.8 or later that can be asked. {_CUDNN}"


def asked_of(version: int) -> str:
    """What is said instead where cuDNN itself was asked: 91900 is 9.19."""
    return (
        f"cuDNN's workspace depends on the algorithm that it picks. cuDNN {version // 10000}."
        f"{version % 10000 // 100} was asked for its plan, without a GPU. Of 2,703 passes on an "
        "H100 with cuDNN 9.19 93 % took what is counted then, and 97 % within 1 MiB or 1 %; an FFT "
        "that is not expected, in 32 bits, can take hundreds of MiB more. With "
        "torch.backends.cudnn.benchmark it takes up to GiBs while it tries"
    )


def unknowable(name: str) -> str | None:
    """Why it is not known what an operator takes, or None.

    Parameters
    ----------
    name : str
        With its namespace: "aten::convolution".
    """
    spec = OPERATORS.get(name)
    if name.partition("::")[0] not in OWN:
        ruled = spec and (
            spec.after or spec.before or spec.between or spec.answer or spec.composition
        )
        return None if ruled else CUSTOM
    return (spec and spec.unknowable) or None
