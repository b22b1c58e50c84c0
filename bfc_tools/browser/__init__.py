"""A run as a page for the browser: what it shows, as one JSON value, and the page itself. In order:

encoding.py      arrays of numbers as short texts
lifetimes.py     when each allocation of a trace was made and freed
tables.py        stacks, frames and owners, each once
kinds.py         what each allocation is for: weights, gradients, and so on
painted.py       what the colours of a map tell apart
aggregates.py    sums over many allocations
segments.py      what keeps each segment
runs.py          one run over time: as it was recorded, or replayed
data.py          all that a page shows
perfetto.py      the same runs for Perfetto
compared.py      two runs, and what grew
render.py        the page, with all that it shows in one file
report.py        `bfc.report`
"""
