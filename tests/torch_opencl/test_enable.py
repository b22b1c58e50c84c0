"""What `enable` takes and refuses, and how a process with tensors on opencl forks and ends: each in
a process of its own."""

from __future__ import annotations

import textwrap

import own_interpreter
import pytest
from torch_script import run

# -- what is missing -------------------------------------------------------------------------------


def test_no_opencl_is_told() -> None:
    run(
        """
        said = refusal(bfc.DeviceUnavailableError, torch_opencl.enable)
        assert "OpenCL" in said and "pip install" in said, said
        assert torch._C._get_privateuse1_backend_name() == "privateuseone", "nothing was renamed"
        """,
        before="""
        os.environ["OCL_ICD_VENDORS"] = os.environ["OCL_ICD_FILENAMES"] = "/nonexistent"
        """,
    )


def test_a_torch_that_is_too_old_is_told() -> None:
    run("""
        version, torch.__version__ = torch.__version__, "2.10.1"
        said = refusal(bfc.DeviceUnavailableError, torch_opencl.enable)
        assert "2.11" in said and "2.10.1" in said, said
        torch.__version__ = version
        assert torch_opencl.enable() == torch.device("opencl"), "and then it can be enabled"
    """)


def test_another_package_that_has_pytorchs_place_is_told() -> None:
    run("""
        torch.utils.rename_privateuse1_backend("npu")
        said = refusal(RuntimeError, torch_opencl.enable)
        assert 'further device "npu"' in said and "without it" in said, said
    """)


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    own_interpreter.run("""
        import bfc.integrations.torch_opencl
        assert "torch" not in sys.modules
        said = ""
        try:
            bfc.integrations.torch_opencl.fallbacks()
        except RuntimeError as error:
            said = str(error)
        assert "call enable() first" in said
        assert "torch" not in sys.modules
    """)
    own_interpreter.run("""
        import subprocess
        code = "import sys, torch; assert 'bfc' not in sys.modules; torch.ones(1)"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    """)


# -- arguments -------------------------------------------------------------------------------------


def test_a_second_call_with_the_same_arguments_is_the_first() -> None:
    run("""
        device = torch_opencl.enable("64 MiB", settings="max_split_size_mb:32")
        assert torch_opencl.enable("64 MiB", settings="max_split_size_mb:32") == device
        for other in (dict(), dict(memory="65 MiB"), dict(memory="64 MiB", policy="bfc")):
            said = refusal(RuntimeError, torch_opencl.enable, **other)
            assert "with other arguments" in said and "another process" in said, said
        assert torch.ones(3, device=device).sum().item() == 3
    """)


@pytest.mark.parametrize("memory", ["64 << 20", "'64 MiB'", "0.25"])
def test_memory_is_bytes_or_a_text_or_a_part(memory: str) -> None:
    run(f"""
        torch_opencl.enable({memory})
        pool = torch.opencl.pool()
        limit = 64 << 20 if {memory} != 0.25 else pool.sub_allocator.memory_info()[1] // 4
        found = pool.stats().bytes_limit
        assert abs(found - limit) <= 1 << 20, (found, limit)
        said = refusal(torch.OutOfMemoryError, torch.empty, limit + (2 << 20), dtype=torch.uint8,
                       device="opencl")
        assert "out of memory" in said
    """)


def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    run("""
        for kind, wrong in [
            (ValueError, dict(policy="best")),
            (ValueError, dict(policy="bfc", settings="max_split_size_mb:32")),
            (bfc.SettingsError, dict(settings="no_such_setting:1")),
            (ValueError, dict(memory="many")),
            (ValueError, dict(memory=-1)),
            (TypeError, dict(devices=[3])),
        ]:
            said = refusal(kind, torch_opencl.enable, **wrong)
            assert said, wrong
            assert torch._C._get_privateuse1_backend_name() == "privateuseone", wrong
        assert torch.ones(3, device=torch_opencl.enable()).sum().item() == 3
    """)


def test_settings_are_pytorchs() -> None:
    run("""
        torch_opencl.enable(settings="max_split_size_mb:32")
        torch.ones(3, device="opencl")
        assert torch.opencl._snapshot()["allocator_settings"]["max_split_size"] == 32 << 20
    """)


def test_tensorflows_policy_counts_under_pytorchs_keys() -> None:
    run("""
        torch_opencl.enable("64 MiB", policy="bfc")
        held = torch.ones(1000, device="opencl")
        gone = torch.ones(5000, device="opencl")
        del gone
        pool, found = torch.opencl.pool(), torch.opencl.memory_stats()
        assert isinstance(pool, bfc.BFCAllocator)
        stats = pool.stats()
        assert {key: n for key, n in found.items() if n} == {
            "active_bytes.all.current": stats.bytes_in_use,
            "active_bytes.all.peak": stats.peak_bytes_in_use,
            "allocated_bytes.all.current": stats.bytes_in_use - stats.bytes_waiting_for_streams,
            "allocated_bytes.all.peak": stats.peak_bytes_in_use,
            "reserved_bytes.all.current": stats.pool_bytes,
            "reserved_bytes.all.peak": stats.peak_pool_bytes,
            "allocation.all.allocated": stats.num_allocs,
        }
        theirs = dict(torch.accelerator.memory_stats())
        assert {key: n for key, n in theirs.items() if n} == {
            key: n for key, n in found.items() if n
        }
        torch.opencl._record_memory_history()
        del held
        assert pool.history()[-1].action == "free_completed"
        assert torch.accelerator.memory_allocated() == 0
    """)


def test_devices_are_those_that_are_given() -> None:
    run(
        """
        import pyopencl as cl
        whole = pocl.devices()[1]
        by = cl.device_partition_property
        part = whole.create_sub_devices([by.EQUALLY, 1])[0]
        torch_opencl.enable("64 MiB", devices=[part, whole])
        assert torch.opencl.device_count() == 2
        assert part.max_compute_units == 1
        # PoCL names the whole device as that of a context of a part
        sources = [torch.opencl.pool(i).sub_allocator for i in range(2)]
        assert sources[0].context != sources[1].context
        assert sources[1].cl_device == whole
        x = torch.arange(4.0, device="opencl:0")
        assert ((x + x) @ x.to("opencl:1").to("opencl:0")).item() == 28
        assert (x.to("opencl:1") * 2).tolist() == [0, 2, 4, 6]
        assert torch.opencl.memory_allocated(1) == 0 < torch.opencl.memory_allocated(0)
        said = refusal(RuntimeError, torch.empty, 1, device="opencl:2")
        assert "there is no device opencl:2" in said and "found 2" in said, said
        """,
        before='os.environ["POCL_DEVICES"] = "basic pthread"',
    )


def test_a_size_that_nothing_has_is_refused() -> None:
    run("""
        device = torch_opencl.enable()
        for size in (1 << 62, (1 << 63) - 1):
            said = refusal(torch.OutOfMemoryError, torch.empty, size,
                           dtype=torch.uint8, device=device)
            assert str(size) in said, said
        said = refusal(RuntimeError, torch.empty, 1 << 62, dtype=torch.float64, device=device)
        assert "overflow" in said, said
        assert torch.ones(3, device=device).sum().item() == 3
    """)


def test_fallbacks_are_counted() -> None:
    run("""
        device = torch_opencl.enable()
        assert torch_opencl.fallbacks() == {}
        x = torch.ones(3, 3, device=device)
        x.add(x).mul(x).div(x).relu().sum()
        x @ x
        assert torch_opencl.fallbacks() == {}, "these have kernels"
        for _ in range(2):
            x.softmax(1)
        x.sigmoid()
        assert list(torch_opencl.fallbacks().items()) == [
            ("aten::_softmax.out", 2), ("aten::sigmoid.out", 1)
        ]
    """)


# -- forks and exits -------------------------------------------------------------------------------


def test_a_fork_is_refused_in_words_and_the_parent_goes_on() -> None:
    run("""
        device = torch_opencl.enable()
        x = torch.ones(3, device=device)
        y = torch.ones(3).pin_memory()

        def in_the_child():
            for use in (x.cpu, x.sum, lambda: torch.ones(1, device=device), lambda: x + x,
                        lambda: x.to(device, torch.float64), torch.opencl._lazy_init):
                said = refusal(RuntimeError, use)
                assert "forked" in said and "spawn" in said, said
            assert not torch.opencl.is_available()
            assert torch.ones(3).sum() == 3, "the CPU works"

        in_child(in_the_child)()
        assert (x + x).sum().item() == 6
        del x, y
        gc.collect()
        assert torch.accelerator.memory_allocated() == 0
    """)


def test_a_child_of_spawn_has_a_device_of_its_own() -> None:
    run("""
        torch.ones(3, device=torch_opencl.enable()).sum()
        import subprocess
        code = (
            "import sys; sys.path.insert(0, 'tests/helpers'); import pocl; pocl.start();"
            "import torch; from bfc.integrations import torch_opencl;"
            "assert torch.ones(3, device=torch_opencl.enable()).sum().item() == 3"
        )
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    """)


@pytest.mark.parametrize(
    "alive",
    [
        "kept = torch.ones(1000, device=device)",
        "kept = torch.nn.Linear(3, 3).to(device); kept(torch.ones(3).to(device)).sum().backward()",
        "kept = torch.ones(1000).pin_memory(), torch.ones(9, device=device)",
        "kept = torch.ones(1000).pin_memory(); there = kept.to(device, non_blocking=True)",
        """
        stream, event = torch.Stream(device), torch.Event(device, enable_timing=True)
        with stream:
            kept = torch.ones(1000, device=device) + 1
            event.record()
        kept.record_stream(torch.Stream(device))
        """,
        """
        def work():
            global kept
            with torch.Stream(device):
                kept = torch.ones(1000, device=device, requires_grad=True)
                (kept * 2).sum().backward()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """,
        """
        done = threading.Event()
        def work():
            held = torch.ones(1000, device=device) + 1
            done.set()
            threading.Event().wait()
        threading.Thread(target=work, daemon=True).start()
        done.wait()
        """,
        """
        torch.set_num_threads(1)
        def work():
            while True:
                kept = torch.ones(100, device=device, requires_grad=True)
                (kept * kept).softmax(0).sum().backward()
        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        """,
        "kept = torch.ones(3, device=device); kept.itself = [kept, torch.Generator(device)]",
        "sys.modules['kept'] = torch.ones(3, device=device)",
        "import atexit; atexit.register(lambda: torch.ones(3, device=device).sum().item())",
    ],
)
def test_a_process_ends_with_code_0(alive: str) -> None:
    run("device = torch_opencl.enable()\n" + textwrap.dedent(alive))
