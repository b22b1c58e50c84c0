"""Experiments with recorded runs: what one run needs under other settings, and what grew between
two. `bfc.study` passes on what compares policies. In order:

    counting.py           sub-allocators that count the calls made to them
    segments.py           what was taken from the device at one moment
    source_lines.py       the line that a stack counts for
    ground.py             what a policy written in Python has taken and handed out
    python_policy.py      a policy written in Python
    figure.py             one run under several policies, drawn
    experiment.py         one trace under several policies
    candidates.py         allocators to try, as text, and one replay
    recorded_settings.py  what a recording says of its own run
    ran_out.py            how a recorded run ran out of memory
    iterations.py         the iterations of a run, one beside the other
    logs/                 logs and error texts of programs that ran out of memory
    file_formats.py       files of recorded runs, told by their content
    cluster.py            workers of Dask
    workers.py            replays in other processes
    search.py             the settings that fit on least
    torch_version.py      the version of PyTorch that a run is replayed under
    advice.py             rows, and how they are written
    planned.py            the row of a plan
    advise.py             `bfc.advise`
    markdown.py           what a comment on a pull request can show
    growth.py             what grew, and how it is written
    diff.py               `bfc.diff`
    budgets.py            budgets of memory in tests
"""
