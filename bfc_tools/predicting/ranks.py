"""A program of several processes: what each of them needs, the worst first, and why it is that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

from bfc.units import format_bytes, printable
from bfc_tools.predicting import letters
from bfc_tools.predicting.asked import Asked
from bfc_tools.predicting.largest import device_of
from bfc_tools.predicting.letters import Key
from bfc_tools.predicting.text import joined
from bfc_tools.predicting.tries import ANSWERS, UNFINISHED, Runs, Tried, all_of, as_counted
from bfc_tools.predicting.world import ALL, Classes, World, in_words

#: How often ranks run again that were told other letters than they had guessed.
ROUNDS = 4
#: So many differences from the middle rank are told, of so many bytes at least.
MOST, TELLING = 3, 1 << 10


@dataclass(frozen=True)
class OneRank:
    """One process of a program, and the letters that others have sent it."""

    asked: Asked
    rank: int
    world: World
    received: Mapping[Key, bytes] = field(default_factory=dict)

    @property
    def real_files(self) -> bool:
        """Whether the program works on the user's files."""
        return self.asked.real_files

    def answer(self) -> dict[str, Any]:
        """Runs it, and returns the figures, with the letters that it has sent."""
        ours = letters.begin(self.received, self.world.size)
        variables = self.world.environment(self.rank)
        asked = replace(self.asked, environment=(*self.asked.environment, *variables))
        return asked.answer() | {
            "letters": letters.packed(ours.sent),
            "guessed": letters.packed(ours.guessed),
            "meshes": [list(shape) for shape in dict.fromkeys(ours.meshes)],
        }


class Ranks:
    """A program's ranks: each that differs is predicted. What has been found so far can be read at
    any time. `told` is called with each rank, and what it came to."""

    def __init__(self, asked: Asked, world: World, told: Callable[[int, Tried], object]) -> None:
        self.asked, self.world, self.told = asked, world, told
        self.found: dict[int, Tried] = {}
        self.is_finished = False
        self.classes = Classes(world)
        self._sent: dict[Key, bytes] = {}
        self._had: dict[int, Mapping[Key, bytes]] = {}

    def run(self, tries: Runs) -> None:
        """Predicts them: first rank 0, which shows whether ranks send each other letters, and which
        meshes they form. Ranks with letters run in their order."""
        self._predict(tries, [0])
        meshes = self.found[0].figures.get("meshes", [])
        self.classes = Classes(self.world, meshes)
        while wanted := self.classes.wanted(self._signs()):
            self._predict(tries, wanted)
        for _ in range(ROUNDS):
            again = [rank for rank in sorted(self.found) if self._was_misled(rank)]
            if not again:
                break
            self._predict(tries, again)
        self.is_finished = True

    def _predict(self, tries: Runs, ranks: list[int]) -> None:
        in_order = any(key[1] != letters.ALL for key in self._sent)
        for some in [[rank] for rank in ranks] if in_order else [ranks]:
            questions = {}
            for rank in some:
                self._had[rank] = self._letters_to(rank)
                questions[rank] = OneRank(self.asked, rank, self.world, self._had[rank])
            for rank, tried in tries.outcomes(questions):
                self.found[rank] = tried
                self._sent |= letters.unpacked(tried.figures.get("letters", []))
                self.told(rank, tried)

    def _letters_to(self, rank: int) -> dict[Key, bytes]:
        """What others have sent to a rank. Of senders that have not run, what the nearest rank has
        got from those that stand to it as they do to this one."""
        found: dict[Key, bytes] = {}
        nearest = sorted(self._sent, key=lambda key: abs(key[1] - rank), reverse=True)
        for sender, receiver, what, number in nearest:
            text, moved = self._sent[sender, receiver, what, number], sender + rank - receiver
            if receiver == letters.ALL and sender != rank:
                found[sender, letters.ALL, what, number] = text
            elif receiver != letters.ALL and (receiver == rank or moved not in self.found):
                found[moved, rank, what, number] = text
        return found

    def _was_misled(self, rank: int) -> bool:
        """Whether a rank failed, or has guessed wrong, and there are other letters now."""
        tried, now = self.found[rank], self._letters_to(rank)
        if now == self._had[rank]:
            return False
        guessed = letters.unpacked(tried.figures.get("guessed", []))
        had = {key: text for key, text in self._had[rank].items() if key[0] not in self.found}
        wrong = any(now.get(key, text) != text for key, text in (had | guessed).items())
        return bool(tried.error) or wrong

    def _signs(self) -> dict[int, Hashable]:
        """What tells ranks apart: ranks of which it is the same use memory alike."""
        return {
            rank: (tried.error, *tried.use, tried.figures.get("peak_reserved"))
            for rank, tried in self.found.items()
        }

    # -- what is said ---------------------------------------------------------------------------

    @property
    def is_known(self) -> bool:
        """Whether anything is known of any rank."""
        return any(tried.figures for tried in self.found.values())

    @property
    def failed(self) -> list[int]:
        """The ranks whose program failed."""
        return [rank for rank, tried in sorted(self.found.items()) if tried.error]

    @property
    def failure(self) -> str:
        """What is said of these."""
        if not self.failed:
            return ""
        rank = self.failed[0]
        others = f" (and {len(self.failed) - 1} more)" if len(self.failed) > 1 else ""
        return f"rank {rank}{others}: {self.found[rank].error}"

    @property
    def worst_first(self) -> list[int]:
        """The ranks that were predicted: first those that fit least, and of these the largest."""

        def badness(rank: int) -> tuple[bool, int, int, int]:
            tried = self.found[rank]
            return tried.fits is False, tried.needs, tried.live, -rank

        return sorted(self.found, key=badness, reverse=True)

    @property
    def worst(self) -> Tried:
        """What is known of the worst rank."""
        return self.found[self.worst_first[0]]

    @property
    def fits(self) -> bool | None:
        """Whether all ranks fit; None if one failed that might not have."""
        return all_of(tried.fits for tried in self.found.values()) if self.found else None

    @property
    def alike(self) -> dict[int, list[int]]:
        """By each rank that was predicted: itself, and those that are taken to be like it."""
        signs = self._signs()
        found: dict[int, list[int]] = {rank: [] for rank in self.worst_first}
        for rank in range(self.world.size):
            found[self.classes.like(rank, signs)].append(rank)
        return found

    @property
    def answer(self) -> str:
        """The first line."""
        return self._answer() if self.is_finished else UNFINISHED + self._answer()

    def _answer(self) -> str:
        rank, worst, size = self.worst_first[0], self.worst, self.world.size
        if not self.is_known:
            return f"No rank of {size} has an answer: {self.failure}"
        on, held = device_of(worst.figures), format_bytes(worst.needs)
        most = "" if any(one.is_unsure for one in self.found.values()) else "at most "
        if self.fits is None:
            some = in_words(self.failed)
            what = f"the others reserve {most}{held} (rank {rank})"
            return f"Rank {some} of {size} failed: it is not known whether it fits on {on}; {what}."
        if self.fits:
            reserves = f"reserves {most}{held}"
            if worst.needs > worst.figures["limit"]:
                reserves = f"fits only just, and would reserve {held} with more room"
            doubt = as_counted(all_of(one.fits_at_most for one in self.found.values()), "a rank")
            ranks = f"all of {size} ranks: the worst, rank {rank}, {reserves}"
            return f"It fits on {on} on {ranks}.{doubt}"
        alike = self.alike
        fail = sum(len(alike[one]) for one, tried in self.found.items() if tried.fits is False)
        return (
            f"It does not fit on {on} on {fail} of {size} ranks: the worst, rank {rank}, would "
            f"reserve {held}."
        )

    def why(self, rank: int) -> dict[str, dict[str, int]]:
        """What a rank has more of at its peak than the middle one, in bytes: by what it is for
        ("by_kind"), and by module."""
        known = {one: tried for one, tried in self.found.items() if tried.figures.get("peak")}
        if rank not in known:
            return {}
        middle = median_low(tried.live for tried in known.values())
        other = next(tried for _, tried in sorted(known.items()) if tried.live == middle)
        found = {}
        for name in ("by_kind", "by_module"):
            ours, theirs = (joined(of.figures["peak"][name]) for of in (known[rank], other))
            more = {one: nbytes - theirs.get(one, 0) for one, nbytes in ours.items()}
            most = sorted(more, key=lambda one: -more[one])[:MOST]
            found[name] = {one: more[one] for one in most if more[one] >= TELLING}
        return found

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON: sizes are in bytes."""
        alike = self.alike
        rows = []
        for rank in self.worst_first:
            tried = self.found[rank]
            figures = {
                name: value
                for name, value in tried.figures.items()
                if name not in ("letters", "guessed", "meshes")
            }
            same = [one for one in alike[rank] if one != rank]
            rows.append(
                {"rank": rank, "error": tried.error, "taken_to_be_like_it": same}
                | {"more_than_the_middle": self.why(rank)}
                | {"figures": figures}
            )
        return {
            "fits": self.fits,
            "answer": self.answer,
            "nproc": self.world.nproc,
            "nnodes": self.world.nnodes,
            "mesh": list(self.classes.shape),
            "ranks": rows,
        }

    def __str__(self) -> str:
        lines = [self.answer, "", *self._table()]
        parts = []
        for name, more in self.why(self.worst_first[0]).items():
            texts = [f"{one or '(none)'} (+{format_bytes(more[one])})" for one in more]
            if texts:
                parts.append(f"{name.replace('_', ' ')}: {', '.join(texts)}")
        if parts:
            lines += ["", f"What rank {self.worst_first[0]} has more of than the middle rank"]
            lines += [f"  {text}" for text in parts]
        if self.world.size > ALL:
            mesh = " x ".join(map(str, self.classes.shape))
            lines += [
                "",
                f"Predicted: ranks {in_words(list(self.found))}, of a mesh of {mesh}. The others",
                "are taken to be like these, as the table says: they lie between two alike.",
            ]
        return "\n".join(map(printable, lines))

    def _first(self, ranks: list[int]) -> int:
        """The first of some ranks that was predicted."""
        return min(rank for rank in ranks if rank in self.found)

    def _table(self) -> list[str]:
        alike, signs = self.alike, self._signs()
        rows: dict[Hashable, list[int]] = {}  # of ranks that use memory alike
        for rank in self.worst_first:
            rows.setdefault(signs[rank], []).extend(alike[rank] or [rank])
        names = {self._first(ranks): in_words(ranks) for ranks in rows.values()}
        width = max(5, *map(len, names.values()))
        lines = [f"{'rank':{width}}  fits           live     reserved  peak in"]
        for rank in names:
            tried = self.found[rank]
            start = f"{names[rank]:{width}}  {ANSWERS[tried.fits]:6}"
            if tried.figures:
                peak = tried.figures["peak"] or {}
                sizes = f" {format_bytes(tried.live):>11}  {format_bytes(tried.needs):>11}"
                place = " ".join(filter(None, (peak.get("phase"), peak.get("line"))))
                start += f"{sizes}  {place}"
            lines.append(start.rstrip())
            if tried.error:
                lines.append(f"{'':{width}}  {tried.error}")
        return lines
