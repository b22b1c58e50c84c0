"""What is said of a script that failed, and what to do about it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bfc_tools.models.names import PREFIX
from bfc_tools.predicting.script import Ran, causes

if TYPE_CHECKING:
    from bfc_tools.predicting.verdict import Verdict


#: Finders of batch sizes.
FINDERS = (
    "find_executable_batch_size",
    "auto_find_batch_size",
    "scale_batch_size",
    "BatchSizeFinder",
)
#: Other words of programs that may adapt to the memory: what they catch.
ADAPTS = ("OutOfMemoryError", "out of memory' in", 'out of memory" in')


def failed(script: str, ran: Ran) -> RuntimeError | None:
    """What is said if the script raised an error, or exited with one."""
    error = ran.error
    if error is None:
        return None
    until = "the figures are those until then"
    if not len(ran.prediction.trace):
        until = "it had allocated nothing on the GPU"
    if isinstance(error, SystemExit):
        if isinstance(error.code, str) and script.startswith(PREFIX):  # words of bfc's own
            return RuntimeError(f"{script}: {error.code}")
        return RuntimeError(f"{script} exited with {error.code!r}; {until}")
    return RuntimeError(
        f"{script} raised {type(error).__name__} (its traceback is above); {until}{_hint(error)}"
    )


def allocated_nothing(script: str) -> ValueError:
    """What is said of a program that has no use for a GPU."""
    return ValueError(
        f"{script} allocated nothing on the GPU: bfc predicts what a program does on the "
        'device "cuda". Does it ask for another device?'
    )


def how_it_ended(ran: Ran) -> str:
    """How the script ended, if not by itself."""
    if ran.signal:
        return "was interrupted"
    return "failed" if ran.error is not None else ""


def hint_to_oom(ran: Ran, verdict: Verdict, text: str) -> str:
    """What is said to a program that may adapt to the memory, as finders of batch sizes do. It may
    as well only report the error, and so settings are searched for it all the same. `text` is that
    of the program."""
    if ran.prediction.limited or verdict.fits is not False:
        return ""
    named = next((word for word in (*ADAPTS, *FINDERS) if word in text), None)
    if named is None:
        return ""
    return (
        f"The program names {named}: if it goes on with less where it runs out of memory, add "
        "--oom. Without that, it is refused only what no GPU holds."
    )


def _hint(error: BaseException) -> str:
    """What to do about an error, or about what caused it."""
    if isinstance(error, NotImplementedError):  # which says it itself
        return ""
    if any(_OF_ANOTHER_BUILD.search(str(cause)) for cause in causes(error)):
        return _ANOTHER_BUILD  # whatever a package has made of that error
    for cause in causes(error):
        if isinstance(cause, ModuleNotFoundError) and cause.name == "triton":
            return ". pip install triton: its kernels are not run here, but the script imports it"
        if any(text in str(cause) for text in _NO_VALUES):
            return (
                ". A kernel of the program's own reads a tensor, which has no values here: make an "
                "operator of it with torch.library.custom_op, and say with register_fake what it "
                "returns"
            )
        if isinstance(cause, OSError) and "CUDA_HOME" in str(cause):
            return _COMPILES
        mesh = _TOO_LARGE_A_MESH.search(str(cause))
        if mesh is not None:
            return f". bfc predict --nproc {mesh[1]} predicts the processes that it wants"
        if isinstance(cause, KeyError) and str(cause).strip("'") in _OF_TORCHRUN:
            return (
                ". torchrun sets that variable. RANK=0 LOCAL_RANK=0 WORLD_SIZE=8 bfc predict "
                "... predicts the first of eight processes"
            )
        for one in type(cause).__mro__:
            if one.__name__ in _HINTS:
                return _HINTS[one.__name__]
    return ""


#: What PyTorch says of operators that no library has registered.
_OF_ANOTHER_BUILD = re.compile(r"operator (torchvision|torchaudio)::\w+ does not exist")
_ANOTHER_BUILD = (
    ". That operator is compiled into a package that does not fit this PyTorch: torchvision and "
    "torchaudio load theirs only beside the PyTorch that they were built for, the same version and "
    "the same build, for CPUs or for CUDA. Install them from where this PyTorch is from"
)
_COMPILES = (
    ". The program compiles code for a GPU, which bfc does not follow: give it what PyTorch has "
    'in place of that, as DeepSpeed with "torch_adam": true among the params of its optimizer'
)
#: What PyTorch says of a mesh of more processes than there are.
_TOO_LARGE_A_MESH = re.compile(r"Mesh should not be bigger than default world size.* found (\d+)")
#: What PyTorch says where something reads the memory of a tensor that is only a shape.
_NO_VALUES = ("its data is not allocated yet", "Cannot access data pointer of Tensor")
_OF_TORCHRUN = frozenset(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"))
_PACKAGE = ". It needs that package here, too: bfc runs the whole script"
_HINTS = {
    "AssertionError": (
        ". If it is about what tensors hold: a prediction mostly does not know that, and takes "
        "for False what depends on it. With PYTHONOPTIMIZE=1 Python leaves asserts out"
    ),
    "LocalEntryNotFoundError": (
        ". It needs the network here, too, or the files in Hugging Face's cache"
    ),
    "MisconfigurationException": (  # Lightning's, if it is asked for more devices than there are
        ". bfc predicts for one GPU: if it asks for more, give it arguments that ask for one"
    ),
    "FileNotFoundError": ". It needs that file here, too: bfc runs the whole script",
    "ModuleNotFoundError": _PACKAGE,
    "ImportError": (
        ". If a package is missing, it is needed here, too: bfc runs the whole script. In place of "
        "kernels that need a GPU, such as flash_attn, give the program what "
        'PyTorch has: attn_implementation="sdpa" for flash_attention_2'
    ),
    **dict.fromkeys(
        ("ConnectionError", "ConnectError", "URLError", "gaierror", "TimeoutError", "HTTPError"),
        ". It needs the network here, too: bfc runs the whole script",
    ),
}
