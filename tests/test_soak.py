"""The fuzzers of `make soak` find what they are made for, and keep the account."""

from __future__ import annotations

import ctypes
import json
import random
from pathlib import Path

import pytest
import soak_account
import soak_native
from soak_captures import captures
from soak_native import Game, habits
from soak_pinned import Pinned, pinned
from soak_plans import plans, play_replans
from soak_turns import turns

import bfc
from bfc.testing import Misbehaving


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_the_model_in_c_says_where_each_request_is_served(seed: int) -> None:
    assert soak_native.places(seed, 20_000) >= 19_500


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["marks", "hostile", "threads", "forks"])
def test_no_two_blocks_share_a_byte(name: str) -> None:
    assert getattr(soak_native, name)(1, 8000) > 4000


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_most_requests_of_a_program_that_repeats_get_their_places(seed: int) -> None:
    assert plans(seed, 20) > 200


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(5))
def test_four_threads_of_python_share_pools(seed: int) -> None:
    assert turns(seed, 2000) == 8000


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the plan does not pay any more:RuntimeWarning")
def test_a_program_that_changes_gets_plans_again_and_again() -> None:
    assert sum(play_replans(seed, 200)[1] for seed in range(8)) >= 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_what_a_graph_was_given_goes_to_nobody_else(seed: int) -> None:
    assert captures(seed, 4000) > 2000


def test_memory_of_a_graph_that_goes_to_others_is_found() -> None:
    """The game takes the requests of a stream for those of a graph, and the allocator does not."""
    wanted = habits("bfc", random.Random(1), 4)
    with bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"), allow_growth=True) as pool:
        game = Game("marks", pool, 1, 1, ctypes.byref(wanted))
        game.call("pool", 1, 7)
        with pytest.raises(AssertionError, match="handed out"):
            game.call("play", 4000)


@pytest.mark.long
def test_pinned_blocks_share_no_byte_and_keep_their_contents() -> None:
    assert pinned(1) > 4000


def test_a_pinned_block_that_was_written_to_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the one who frees it: something else has cleared its last byte."""
    allocate = Pinned.allocate

    def cleared(self: Pinned, dice: random.Random) -> object:
        made = allocate(self, dice)
        if made is not None:
            _, address, nbytes, mark = made
            ctypes.memset(address + nbytes - 1, mark[-1] ^ 1, 1)
        return made

    monkeypatch.setattr(Pinned, "allocate", cleared)
    with pytest.raises(AssertionError, match="other contents"):
        pinned(1)


def test_a_block_that_is_handed_out_twice_is_found() -> None:
    source, dice = Misbehaving(bfc.HostSubAllocator("64 MiB")), random.Random(1)
    source.on("alloc", returns=source.alloc(4096, 8 << 20))
    source.on("free", returns=None)  # the other pool uses it
    pools = [bfc.BFCAllocator(source, memory_limit="8 MiB") for _ in range(2)]
    wanted = habits("bfc", dice)
    wanted.large, wanted.most_live = 1 << 14, 60
    games = [Game("marks", pool, 1, 1, ctypes.byref(wanted)) for pool in pools]
    games[0].call("play", 200)
    with pytest.raises(AssertionError, match="block"):
        games[1].call("play", 200)


def test_a_wrong_address_is_found() -> None:
    """The model of one policy disagrees with the other."""
    setting = soak_native.Setting(1, 0, 64 << 20, 128 << 20, 1 << 20, 200)
    pool = bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"))
    with pytest.raises(AssertionError, match=r"model|not at"):
        Game("places", pool, 1, ctypes.byref(setting)).call("play", 1000)


def test_the_account_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BFC_CACHE_HOME", str(tmp_path))
    soak_account.added({"places": [10, 2.0, 1]})
    account = soak_account.added({"places": [5, 1.0, 0], "marks": [1, 1.0, 0]})
    assert account == {"places": [15, 3.0, 1], "marks": [1, 1.0, 0]}
    assert json.loads((tmp_path / "soak.json").read_text()) == account
    assert soak_account.table(account).splitlines()[-1].split() == ["all", "16", "4", "4", "1"]
