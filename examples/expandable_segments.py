"""Records a run of 32.0 GiB, and replays it on a device of 34 GiB: under PyTorch's default settings
it is refused, and with expandable segments it completes. Needs no GPU. Run it in the checkout.

    $ python examples/expandable_segments.py
    with expandable_segments:False: 1 refused, 33.3 GiB reserved
    with expandable_segments:True: 0 refused, 34.0 GiB reserved
"""

import tempfile

import bfc

with tempfile.TemporaryDirectory() as folder:
    recorder = bfc.CachingAllocator(bfc.SimulatedSubAllocator("80 GiB"))
    recorder.record_history(context=None)
    bfc.Trace.load("bench/traces/gpt2s_varlen.npz").replay(recorder)  # or a program of yours
    recorder.dump(f"{folder}/run.pickle")
    run = bfc.Trace.from_torch(f"{folder}/run.pickle")
for settings in ("expandable_segments:False", "expandable_segments:True"):
    device = bfc.SimulatedSubAllocator("34 GiB")
    with bfc.CachingAllocator(device, settings=settings, strict=True) as allocator:
        result = run.replay(allocator)
    reserved = f"{result.peak_bytes_reserved / 2**30:.1f} GiB reserved"
    print(f"with {settings}: {result.failed} refused, {reserved}")
