"""The header under a back end of somebody else's: `second_backend.cpp`, whose memory is the host's.
PyTorch keeps an allocator for good, so each test has a process of its own."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from torch_script import forks

SOURCE = Path(__file__).with_name("second_backend.cpp")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "pytorch.md"
HELPERS = ROOT / "tests" / "helpers"

SETUP = f"""
import atexit, contextlib, ctypes, faulthandler, gc, os, sys, threading, time, types, warnings
from pathlib import Path

import torch

import bfc
from bfc.integrations.torch_backend import capsule
from bfc_torch_opencl import building

faulthandler.enable()
sys.path.insert(0, {str(HELPERS)!r})
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "Set seed")   # it has no generator of its own
atexit.register(time.sleep, 0.05)   # PyTorch's thread for backward() must end before: see enable
backend = building.load(Path({str(SOURCE)!r}))
torch.utils.rename_privateuse1_backend("second")
module = types.ModuleType("torch.second")
module.is_available = lambda: True
torch._register_device_module("second", module)
memory = torch.accelerator

def refused(call, *arguments, error=RuntimeError):
    try:
        call(*arguments)
    except error as refusal:
        return str(refusal)
    raise AssertionError("it was not refused")
"""
SERVED = """
pools = [{policy}(bfc.HostSubAllocator("256 MiB"){options}) for _ in range(2)]
backend.serve(capsule(pools))
"""
POLICIES = {
    "bfc": SERVED.format(policy="bfc.BFCAllocator", options=", allow_growth=True"),
    "caching": SERVED.format(policy="bfc.CachingAllocator", options=""),
}


def run(code: str, served: str = POLICIES["caching"]) -> str:
    """Runs a script, which must come to its end. Returns what it has printed, errors included."""
    script = SETUP + served + textwrap.dedent(code) + "\nprint('at the end')\n"
    done = forks().run(script, (), 300)  # seconds: the first one compiles
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "at the end\n" in done.stdout, said[-3000:]
    return said


def test_the_page_shows_what_is_compiled_here() -> None:
    """Line by line, whatever stands between them."""
    (shown,) = re.findall(r"```cpp\n(.*?)```", PAGE.read_text(), re.DOTALL)
    compiled = {line.strip() for line in SOURCE.read_text().splitlines()}
    lines = [line.strip() for line in shown.splitlines() if not line.strip().startswith("//")]
    assert len(lines) > 5
    assert set(lines) - {""} <= compiled


@pytest.mark.parametrize("policy", POLICIES)
def test_tensors_train_and_give_their_memory_back(policy: str) -> None:
    run(
        """
        def losses(device):
            torch.manual_seed(1)
            layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
            model = torch.nn.Sequential(*layers)
            x = torch.randn(16, 4)
            x, model = x.to(device), model.to(device)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for _ in range(5):
                loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield loss.item()

        assert list(losses("second")) == list(losses("cpu"))
        view = torch.arange(12.0, device="second").view(3, 4).t()[1:]
        assert view.cpu().tolist() == [[1, 5, 9], [2, 6, 10], [3, 7, 11]]
        assert torch.empty_strided((2, 2), (1, 2), device="second").stride() == (1, 2)
        grown = view.contiguous().resize_(100)
        assert grown.cpu().flatten()[:9].tolist() == [1, 5, 9, 2, 6, 10, 3, 7, 11]
        assert memory.memory_allocated() > 0
        del view, grown
        gc.collect()
        assert memory.memory_allocated() == 0
        """,
        POLICIES[policy],
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_the_statistics_are_the_pools_key_by_key(policy: str) -> None:
    run(
        """
        from bfc.integrations import _torch_stats

        def memory_stats(pool):    # torch.accelerator has no place for rejections
            found = _torch_stats.memory_stats(pool)
            return {key: value for key, value in found.items() if key != "num_oom_rejections"}

        kept = [torch.empty(n, device=f"second:{n % 2}") for n in (3, 4, 300_001, 3_000_000)]
        del kept[0]
        zeros = dict.fromkeys(memory.memory_stats(0), 0)    # TensorFlow's policy counts less
        for device, pool in enumerate(pools):
            assert memory_stats(pool)["allocated_bytes.all.current"] > 0
            assert memory.memory_stats(device) == zeros | memory_stats(pool)
            memory.reset_peak_memory_stats(device)
            memory.reset_accumulated_memory_stats(device)
            assert memory.memory_stats(device) == zeros | memory_stats(pool)
            assert memory.max_memory_allocated(device) == memory.memory_allocated(device) > 0
            free, total = memory.get_memory_info(device)
            assert 0 < free <= total == 256 << 20
        """,
        POLICIES[policy],
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_that_runs_out_is_pytorchs_error_with_the_pools_text(policy: str) -> None:
    run(
        """
        x = torch.empty(160 << 20, dtype=torch.uint8, device="second")
        more = lambda: torch.empty(200 << 20, dtype=torch.uint8, device="second")
        said = refused(more, error=torch.OutOfMemoryError)
        assert "200.00 MiB" in said and "of a limit of 256.00 MiB" in said, said
        y = torch.empty(200 << 20, dtype=torch.uint8, device="second:1")
        del x
        memory.empty_cache()
        assert memory.memory_reserved(0) == 0
        more()
        """,
        POLICIES[policy],
    )


def test_memory_that_another_stream_uses_waits_for_it() -> None:
    """As far as the pool goes: this back end's streams never have anything left to do."""
    run(
        """
        pools[0].record_history()
        x = torch.empty(1000, device="second")
        other = torch.Stream("second")
        assert other.stream_id != 0
        with other:
            y = torch.empty(1000, device="second")
        x.record_stream(other)
        y.record_stream(other)      # where it was made: nothing to note
        addresses = x.data_ptr(), y.data_ptr()
        del x, y
        streams = {e.addr: e.stream for e in pools[0].history() if e.action == "alloc"}
        assert [streams[address] for address in addresses] == [0, other.stream_id]
        torch.empty(1000, device="second")
        assert memory.memory_stats()["active.all.current"] == 0
        """
    )


def test_two_devices_have_a_pool_each() -> None:
    run(
        """
        x, y = (torch.ones(1000, device=f"second:{device}") for device in range(2))
        assert [pool.stats().bytes_in_use for pool in pools] == [4096, 4096]
        assert [backend.device_of(t.data_ptr() + 3999) for t in (x, y)] == [0, 1]
        assert backend.device_of(id(x)) == -1
        y.copy_(x + 1)
        assert y.cpu().tolist() == [2] * 1000
        z = torch.zeros(1000, device="second")
        backend.copy_data(z.data_ptr(), x.data_ptr(), 2000)
        assert z.cpu().tolist() == [1] * 500 + [0] * 500
        said = refused(backend.copy_data, 8, x.data_ptr(), 8)
        assert "lies in no pool" in said, said
        y.untyped_storage().resize_(8000)
        assert y[:1000].cpu().tolist() == [2] * 1000
        with torch.device("second"), memory.device_index(1):
            assert torch.empty(3).device.index == 1
        """
    )


def test_a_pointer_that_is_freed_twice_changes_nothing() -> None:
    """The deleter runs in destructors: no exception leaves it, though warnings are errors here."""
    said = run(
        """
        before = pools[0].stats()
        for count in (1, 2):
            backend.free(12345)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            backend.free(12345)
        assert len(seen) == 1 and seen[0].category is RuntimeWarning
        assert pools[0].stats() == before
        """
    )
    assert said.count("Exception ignored in: 'a free without the GIL'") == 2
    assert said.count("RuntimeWarning: 0x3039 was freed, and is not live") == 2


def test_a_free_keeps_the_exception_that_is_raised_at_the_moment() -> None:
    run(
        """
        pools[0].record_history()       # so that frees have more to do

        def fails():
            x = torch.ones(1000, device="second")
            y = torch.ones(1000, device="second")
            y.record_stream(torch.Stream("second"))
            raise LookupError("the first")

        for _ in range(100):
            try:
                fails()
            except LookupError as error:
                assert error.args == ("the first",)
        gc.collect()
        assert memory.memory_allocated() == 0
        """
    )


def test_what_cannot_serve_is_refused_in_words() -> None:
    run(
        """
        from torch_table import NAME, Structure, at

        said = refused(lambda: torch.empty(3, device="second"))
        assert "no allocator serves second yet" in said, said
        for wrong in (3, None, object()):
            assert "takes the capsule of bfc" in refused(backend.serve, wrong)
        pools = [bfc.CachingAllocator(bfc.HostSubAllocator("64 MiB")) for _ in range(2)]
        good = capsule(pools)
        new, word = ctypes.pythonapi.PyCapsule_New, ctypes.c_void_p
        new.restype, new.argtypes = ctypes.py_object, (word, ctypes.c_char_p, word)
        small = ctypes.sizeof(Structure) - 8
        for field, value, advice in [
            ("version", 2, "compile the back end again"),
            ("version", 0, "build bfc again"),
            ("size", small, "modules of bfc are older than the bfc_allocator.h of this back end"),
        ]:
            other = Structure.from_buffer_copy(at(good))
            setattr(other, field, value)
            said = refused(backend.serve, new(ctypes.addressof(other), NAME, None))
            assert advice in said, said
        backend.serve(good)
        backend.serve(good)
        assert "another allocator serves second" in refused(backend.serve, capsule(pools))
        del good, pools
        gc.collect()
        assert torch.ones(3, device="second").sum().item() == 3
        """,
        served="",
    )


def test_threads_share_the_pools() -> None:
    run(
        """
        def work(device):
            x = torch.ones(1000, device=f"second:{device}", requires_grad=True)
            for _ in range(100):
                (x * 2).sum().backward()
            assert x.grad[0].item() == 200

        threads = [threading.Thread(target=work, args=[number % 2]) for number in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            memory.empty_cache()
            memory.memory_stats()
            pools[0].snapshot()
        gc.collect()
        assert [memory.memory_allocated(device) for device in range(2)] == [0, 0]
        for pool in pools:
            pool.check()
        """
    )


def test_a_fork_goes_on() -> None:
    run(
        """
        x = torch.ones(1000, device="second")
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                total = (x + 1).sum().item()
                del x
                os._exit(0 if total == 2000 and memory.memory_allocated() == 0 else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        assert x.sum().item() == 1000
        """
    )


def test_a_process_ends_as_usual_with_live_tensors() -> None:
    said = run(
        """
        class Late:
            def __del__(self):      # when the interpreter is half gone
                self.tensor.add(1)

        torch.kept = [torch.ones(1000, device="second"), Late()]
        torch.kept[1].tensor = torch.kept[0]
        other = torch.ones(1000, device="second:1")
        other.record_stream(torch.Stream("second:1"))
        """
    )
    assert "Fatal" not in said
