"""What `bfc run` or BFC_RUN says, as a text for other processes, and the pools that it means."""

from __future__ import annotations

import argparse
import atexit
import difflib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import bfc
from bfc.integrations import _torch_cuda
from bfc.suballocators import SubAllocator
from bfc_tools.cli.policies import policies
from bfc_tools.cli.served import MOST, name_of_process, say
from bfc_tools.cli.streams import tell
from bfc_tools.study.counting import CountedCUDA

#: Read by each process that imports torch; and the process that `bfc run` began.
VARIABLE, FIRST = "BFC_RUN", "BFC_RUN_FIRST"
WORDS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class Wanted:
    """What is to serve PyTorch."""

    policy: str = "caching:stitch"  # as `bfc replay` spells it
    memory_limit: str | None = None
    plan: str | None = None  # a file
    history: bool = False  # PyTorch's, from the first allocation
    summary: bool = False  # said at the end
    report: str | None = None  # the page to write at the end

    @classmethod
    def read(cls, text: str) -> Wanted:
        """From the text of BFC_RUN: a policy, and options after commas. Raises ValueError."""
        given: dict[str, Any] = {}
        rest = []
        known = [field.name for field in fields(cls) if field.name != "policy"]
        for word in text.split(","):
            name, equals, value = word.strip().partition("=")
            if not equals or name.partition(":")[2] or name in ("stitch", "page_size"):
                rest.append(word.strip())
            elif name not in known:
                near = difflib.get_close_matches(name, known, 1) or [", ".join(known)]
                raise ValueError(f"{VARIABLE} has no option {name!r}. Did you mean {near[0]!r}?")
            else:
                given[name] = _truth(name, value) if name in _FLAGS else value
        policy = ",".join(rest)
        return cls(policy=policy, **given) if policy else cls(**given)

    def text(self) -> str:
        """What `read` reads. Raises ValueError for a file with a comma in its name."""
        words = [self.policy]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value not in (None, False):
                words.append(f"{field.name}={value}")
        for file in filter(None, (self.plan, self.report)):
            if "," in file:
                raise ValueError(f"{file}: a comma in the name of this file would end it")
        return ",".join(words)

    def files(self) -> bfc.Plan | None:
        """The plan, if one is wanted. Raises what is wrong with the files that are named."""
        if self.report is not None and not os.path.isdir(os.path.dirname(self.report) or os.curdir):
            raise FileNotFoundError(f"--report {self.report}: there is no such folder")
        return None if self.plan is None else bfc.Plan.load(self.plan)

    def maker(self, torch: str, settings: str) -> Callable[[SubAllocator], bfc.CachingAllocator]:
        """What makes a pool, for a version of PyTorch and the settings of the environment. Raises
        ValueError, SettingsError or PlanError for what cannot be."""
        name = self._with_settings(settings, torch)
        (policy,) = policies(
            argparse.Namespace(
                policy=[name],
                memory_limit=self.memory_limit,
                torch=torch,
                allow_growth=False,
                strict=False,
            )
        )
        made: Any = policy.make_allocator
        return made  # type: ignore[no-any-return]

    def _with_settings(self, settings: str, torch: str) -> str:
        kind, _, text = self.policy.partition(":")
        if kind != "caching":
            raise ValueError(
                f"--policy {self.policy}: PyTorch's whole allocator is a CachingAllocator: "
                "--policy caching, or caching:stitch; SETTINGS may follow"
            )
        if not settings:
            return self.policy
        if ":" in text:
            raise ValueError(
                f"PYTORCH_CUDA_ALLOC_CONF says {settings}, and --policy has settings, too: leave "
                "one of them out"
            )
        _torch_cuda.checked_settings(settings, torch, stitch=text.startswith("stitch"))
        return f"{self.policy}{',' if text else ':'}{settings}"


_FLAGS = ("history", "summary")


def _truth(name: str, value: str) -> bool:
    if value.lower() not in WORDS:
        raise ValueError(f"{VARIABLE}: {name} is True or False, not {value!r}")
    return WORDS[value.lower()]


def serve_as_told() -> None:
    """Puts pools in the place of PyTorch's allocator, as BFC_RUN says. Called when torch has been
    imported. Raises what `install` raises, and ValueError for what the variable cannot mean."""
    wanted = Wanted.read(os.environ[VARIABLE])
    torch = _torch_cuda.checked_torch()
    settings = _torch_cuda.settings_of_environment()
    make = wanted.maker(_torch_cuda.rules_for(torch), settings)
    plan = wanted.files()
    records = wanted.summary or wanted.report is not None

    def make_pool(device: int) -> bfc.CachingAllocator:
        kind = CountedCUDA if wanted.summary else bfc.CUDASubAllocator
        pool = make(_torch_cuda.device_memory(device, kind))
        if plan is not None:
            use_plan(pool, plan, str(wanted.plan))
        if wanted.history and not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history()
        if records:
            context = None if wanted.report is None else "all"
            pool.record_history(context=context, max_entries=MOST)
        return pool

    bfc.integrations.torch.install(make_pool)
    books = _torch_cuda.serving()
    assert books is not None
    if wanted.report is not None:
        books.context = "all"
    if records or plan is not None:
        atexit.register(_say, books, wanted, settings, os.getpid())


def use_plan(pool: bfc.CachingAllocator, plan: bfc.Plan, file: str) -> None:
    """Has a pool serve the plan of a file, or says why it does not."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # which says the same
        pool.use_plan(plan, steps="auto")
    stats = pool.plan_stats()
    if stats["state"] in ("none", "declined", "switched off"):
        tell(f"bfc: {file} is not served, the policy alone is: {stats['why']}")


def _say(books: _torch_cuda.Books, wanted: Wanted, settings: str, pid: int) -> None:
    """At the end of the process, but not of a child that it has forked."""
    if os.getpid() != pid:
        return
    say(
        books.pools,
        settings,
        name_of_process(os.environ.get(FIRST), os.environ, pid),
        with_summary=wanted.summary,
        report=wanted.report,
        plan=wanted.plan,
    )
