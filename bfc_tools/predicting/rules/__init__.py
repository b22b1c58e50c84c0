"""What CUDA's operators allocate beside their results, and what they answer. In order:

interface.py          what a rule is given, and what it returns
operators.py          all that is known of operators, and where it was read
tensors.py            what rules ask of a tensor
in_place.py           what gradients do in place
stand_ins.py          what counts as a function of PyTorch that it stands in for
values.py             what a program reads of a tensor that has no values
elements.py           single elements, written and read in loops
cub.py                the temporary storage of CUB's algorithms
gemm.py               cuBLAS and cublasLt
reductions.py         partial results of sums, maxima and the like
indexing.py           index, index_put and embeddings
copies.py             what is copied, or computed, on the way
losses.py             the losses of each element, before they are summed up
normalization.py      the gradients of norms, batch norm
foreach.py            operators on lists of tensors
sorting.py            sorting, choosing and sampling
uniques.py            elements that differ, and how often each occurs
attention.py          the kernels of scaled_dot_product_attention
sdpa_choice.py        which of them a GPU takes
sdpa.py               attention as the GPU would run it
encoder.py            layers of a transformer in inference, which are one operator
unknowable.py         operators whose kernels take memory that only a GPU knows
shared_sums.py        what cuDNN's kernels keep of the sums that they share
orders.py             what a GPU takes instead of what cuDNN plans without one
convolution_workspaces.py  how much memory cuDNN works in
columns.py            convolutions without cuDNN
convolution.py        convolutions, as cuDNN does them
recurrent.py          recurrent networks, which cuDNN computes in one call
choices.py            what PyTorch decides by asking what a tensor is
gradients.py          gradients that it computes otherwise for subclasses
storages.py           memory of the host that becomes a tensor
files.py              what is saved, and loaded again
shapes.py             results that PyTorch says nothing of for fake tensors
fourier.py            Fourier transforms
solvers.py            factorisations, and systems of equations
compressed.py         tensors of compressed rows or columns
sparse.py             tensors of indices and values
distributed.py        the memory of one process among several
sending.py            what it sends to others, and gets from them
triton_kernels.py     kernels of Triton, which are not run
inductor.py           what Inductor plans for a graph
compiled.py           torch.compile
"""

from bfc_tools.predicting.rules import (
    attention,
    choices,
    compiled,
    compressed,
    convolution,
    copies,
    distributed,
    elements,
    encoder,
    files,
    foreach,
    fourier,
    gemm,
    gradients,
    in_place,
    indexing,
    inductor,
    losses,
    normalization,
    recurrent,
    reductions,
    sdpa,
    sending,
    shapes,
    solvers,
    sorting,
    sparse,
    storages,
    triton_kernels,
    uniques,
    unknowable,
    values,
)
from bfc_tools.predicting.rules.interface import Call, Doubt, Release, Workspace
from bfc_tools.predicting.rules.operators import OPERATORS, answer, around, before, file, rule

__all__ = [
    "OPERATORS",
    "Call",
    "Doubt",
    "Release",
    "Workspace",
    "answer",
    "around",
    "attention",
    "before",
    "choices",
    "compiled",
    "compressed",
    "convolution",
    "copies",
    "distributed",
    "elements",
    "encoder",
    "file",
    "files",
    "foreach",
    "fourier",
    "gemm",
    "gradients",
    "in_place",
    "indexing",
    "inductor",
    "losses",
    "normalization",
    "recurrent",
    "reductions",
    "rule",
    "sdpa",
    "sending",
    "shapes",
    "solvers",
    "sorting",
    "sparse",
    "storages",
    "triton_kernels",
    "uniques",
    "unknowable",
    "values",
]
