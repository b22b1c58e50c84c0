"""What programs are predicted to need under each release of PyTorch that is known.

`make predicted` writes the figures into `predicted.tsv`, so that the difference of a commit shows
what a change of a rule does to them, and to no other release. A long test compares them, and a
quick one a part of them. Small programs ask for each rule that differs between releases, on GPUs
of several capabilities; larger ones are of `bench.programs`, and need nothing but torch.

Only the installed PyTorch runs. Each row has its operators, by the rules of the row's release.
cuDNN is not asked, whose answers change with its own release.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.programs import PROGRAMS
from bfc.trace.trace import ALLOCATE

FILE = Path(__file__).with_suffix(".tsv")
HEAD = ("program", "GPU", "release", "live", "allocated", "reserved", "events", "digest")
#: With the capability where it is not the GPU's own: 11.0 is that of a Jetson Thor.
GPUS: dict[str, dict[str, Any]] = {
    "t4": {},
    "a100": {},
    "h100": {},
    "b200": {},
    "cc 11.0": {"device": "64 GiB", "cc": "11.0", "sms": 20},
}
LARGER = (
    *("tagger", "translator", "judges_reviews", "gpt_by_hand", "wavenet", "points"),
    *("factorises", "dqn", "physics", "dcgan", "vae", "diffusion"),
)
STEPS = 2
#: What the caller may have set, as if it were not.
WITHOUT = {
    "BFC_CUDNN_LIBRARY": "",
    "CUBLAS_WORKSPACE_CONFIG": "",
    "CUBLASLT_WORKSPACE_SIZE": "1024",
    "TORCH_CUBLAS_WORKSPACE_CACHE": "",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "",
}
Row = tuple[str, ...]


def _biases(torch: Any) -> None:
    for rows in (64, 1):
        model = torch.nn.Linear(256, 512, device="cuda", dtype=torch.float16)
        model(torch.ones(rows, 256, device="cuda", dtype=torch.float16)).sum().backward()


def _volumes(torch: Any) -> None:
    model = torch.nn.Conv3d(4, 8, 3, device="cuda", dtype=torch.bfloat16)
    model(torch.ones(2, 4, 12, 12, 12, device="cuda", dtype=torch.bfloat16)).sum().backward()


def _largest(torch: Any) -> None:
    for shape in ((1_000_000,), (4, 200_000), (512, 1024)):
        torch.randn(shape, device="cuda").topk(10)


def _embeds(torch: Any) -> None:
    for words, width, count in ((100, 512, 8192), (50_000, 64, 20_000)):
        words_in = torch.randint(words, (count,), device="cuda")
        torch.nn.Embedding(words, width, device="cuda")(words_in).sum().backward()


def _sorts(torch: Any) -> None:
    numbers = torch.randint(1000, (300_000,), device="cuda")
    numbers.sort(stable=True)
    numbers.unique(return_inverse=True, return_counts=True)
    numbers.cumsum(0)
    numbers[numbers % 2 == 0].nonzero()
    torch.sparse_coo_tensor(
        numbers[None], numbers.float(), (1000,), check_invariants=False
    ).coalesce()


def _attends(torch: Any, *shapes: tuple[int, ...], **options: Any) -> None:
    query, key = (
        torch.randn(one, device="cuda", dtype=torch.float16, requires_grad=True) for one in shapes
    )
    attention = torch.nn.functional.scaled_dot_product_attention
    attention(query, key, key, **options).sum().backward()


#: By what each asks for.
SMALL: dict[str, Callable[[Any], None]] = {
    "bias": _biases,
    "volume": _volumes,
    "topk": _largest,
    "embedding": _embeds,
    "cub": _sorts,
    "heads": lambda torch: _attends(torch, (2, 8, 128, 64), (2, 8, 128, 64)),
    "large heads": lambda torch: _attends(torch, (2, 4, 128, 256), (2, 4, 128, 256)),
    "causal": lambda torch: _attends(torch, (2, 8, 128, 64), (2, 8, 128, 64), is_causal=True),
    "fine dropout": lambda torch: _attends(torch, (2, 8, 128, 64), (2, 8, 128, 64), dropout_p=0.1),
    "dropout": lambda torch: _attends(torch, (2, 8, 128, 64), (2, 8, 128, 64), dropout_p=0.25),
    "no batch": lambda torch: _attends(torch, (8, 128, 64), (8, 128, 64)),
    "shared": lambda torch: _attends(torch, (2, 8, 128, 64), (2, 2, 128, 64), enable_gqa=True),
    "one head": lambda torch: _attends(torch, (2, 8, 128, 64), (2, 1, 128, 64)),
}


def releases() -> list[str]:
    """Those that are known, the oldest first."""
    from bfc_tools.predicting.releases import RELEASES

    return [one.name for one in RELEASES]


def small(release: str, gpus: Iterable[str] = GPUS) -> Iterator[Row]:
    """The figures of the small programs under a release, one after the other on each GPU."""
    import torch

    cuda = torch.cuda
    for gpu in gpus:
        with _predicted(gpu, release) as run:
            begins = [0]
            figures = []
            for program in SMALL.values():
                cuda.empty_cache()
                cuda.reset_peak_memory_stats()
                program(torch)
                live = cuda.memory_stats()["requested_bytes.all.peak"]
                figures.append((live, cuda.max_memory_allocated(), cuda.max_memory_reserved()))
                begins.append(len(run.trace))
        events = itertools.starmap(slice, itertools.pairwise(begins))
        for name, found, part in zip(SMALL, figures, events, strict=True):
            yield _row((name, gpu, release), found, run.trace, part)


def larger(release: str) -> Iterator[Row]:
    """The figures of programs of `bench.programs` under a release."""
    import torch

    for name in LARGER:
        with _predicted("h100", release) as run:
            step = PROGRAMS[name](torch)
            for _ in range(STEPS):
                step()
        figures = run.peak_requested, run.peak_allocated, run.peak_reserved
        yield _row((name, "h100", release), figures, run.trace, slice(len(run.trace)))


@contextlib.contextmanager
def _predicted(gpu: str, release: str) -> Iterator[Any]:
    import torch

    import bfc

    options = GPUS[gpu] or {"device": gpu}
    options = {**options, "settings": "", "as_torch": release}
    with patch.dict(os.environ, WITHOUT), bfc.predict(**options) as run:
        torch.manual_seed(0)
        yield run


def _row(names: Row, figures: tuple[int, ...], trace: Any, part: slice) -> Row:
    """A line: the digest tells events apart by what they allocate and free, and in which order.
    What a program before has left does not count, and allocations are numbered anew."""
    number = trace.id[part]
    own = number >= number[trace.op[part] == ALLOCATE].min()
    number = number[own] - number[own].min()
    found = hashlib.sha256(number.tobytes())
    for column in (trace.op, trace.size, trace.stream):
        found.update(column[part][own].tobytes())
    return *names, *map(str, figures), str(len(number)), found.hexdigest()[:12]


def head() -> Row:
    """The first line: the columns, and the installed PyTorch, whose operators run."""
    import torch

    return *HEAD, "by PyTorch {}.{}".format(*torch.__version__.split(".")[:2])


def written() -> list[Row]:
    """The lines of the file."""
    return [tuple(line.split("\t")) for line in FILE.read_text().splitlines()]


def main() -> int:
    """Writes the file."""
    found = [head()]
    for release in releases():
        found += [*small(release), *larger(release)]
    FILE.write_text("".join("\t".join(row) + "\n" for row in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
