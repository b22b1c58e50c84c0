"""PyTorch's words and files: settings, snapshots for its viewer, and the recordings that it writes.

Nothing here knows an allocator of ours. In order:

    words.py               its names of actions, states and counters
    sizes.py               the sizes of its policy in bytes
    grammar.py             how the text of settings is read
    settings.py            the settings of the caching policy
    pinned_settings.py     those of the allocator of pinned memory
    _entries.pyx           which entries of a history its viewer can follow, and their dicts
    _pickled.pyx           the same as a pickle
    writer.py              a snapshot as the pickle that PyTorch's memory viewer opens
    _pickle.pyx            the machine that reads a pickle
    plain_pickle.py        a pickle read without Python's unpickler
    _stacks.pyx            numbers for the stacks of a recording
    owners.py              whose an allocation is
    layout.py              requests that lay out what was live before a recording begins
    releases.py            which segments went because the cache was emptied
    reader.py              what PyTorch recorded, as a trace
    stripped.py            a snapshot without names of programs and persons
"""
