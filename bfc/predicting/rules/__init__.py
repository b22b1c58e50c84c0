"""What CUDA's operators allocate beside their results, and what they answer. In order:

interface.py          what a rule is given, and what it returns
values.py             what a program reads of a tensor that has no values
gemm.py               cuBLAS and cublasLt
reductions.py         partial results of sums, maxima and the like
indexing.py           index, index_put and embeddings
"""

from bfc.predicting.rules import gemm, indexing, reductions, values
from bfc.predicting.rules.interface import Call, Release, Workspace, answer, around, before, rule

__all__ = [
    "Call",
    "Release",
    "Workspace",
    "answer",
    "around",
    "before",
    "gemm",
    "indexing",
    "reductions",
    "rule",
    "values",
]
