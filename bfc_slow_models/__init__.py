"""The two originals as slow, simple models in Python: `bfc.testing.Twins` compares allocators with
them.

A model has lists and `min()` where bfc has bins, and nothing of bfc's engine. Each allocator is
described twice: in `docs/behaviour/`, and here, so that it can be run. In order:

    recorded_source.py      what a sub-allocator returned to an allocator, for the model
    torch_words.py          PyTorch's names
    tensorflow_model.py
    partitioned_model.py    the same with requests from two ends
    torch_device.py         the device that PyTorch's model runs on
    torch_records.py
    torch_statistics.py     statistics and the trace
    torch_pools.py          private pools
    torch_events.py         frees that wait for other streams
    torch_ranges.py         expandable segments
    torch_model.py
    model_runner.py         a model beside an allocator of bfc
"""
