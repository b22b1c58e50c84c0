"""PyTorch's terms and files: settings, snapshots for its viewer, and the recordings that it writes.

Nothing here uses an allocator of bfc. In order:

    words.py               its names of actions, states and counters
    rules.py               what sets its versions apart
    sizes.py               the sizes of its policy in bytes
    grammar.py             how the text of settings is read
    settings.py            the settings of the caching policy
    pinned_settings.py     those of the allocator of pinned memory
    _serialized.pyx        the pickle of what its viewer can follow
    writer.py              a snapshot as the pickle that PyTorch's memory viewer opens
    layout.py              requests that lay out what was live before a recording begins
    version.py             the version that wrote a recording
    releases.py            which segments were freed because the cache was emptied
    _recording.pyx         what is kept of a recording while its file is read
    pools.py               which private pools are held, and captured into, at which time
    _pickle.pyx            the machine that reads a pickle
    plain_pickle.py        a pickle read without Python's unpickler
    owners.py              the owner of each allocation in a recording
    ranges.py              the ranges that a program named while it was recorded
    conversion.py          a history as the events of a trace
    reader.py              what PyTorch recorded, as a trace
    extension.py           extensions of PyTorch, compiled when first used
    _fake_device.pyx       a device "cuda" in a PyTorch that has none
    stripped.py            a snapshot without the names of programs and persons
"""
