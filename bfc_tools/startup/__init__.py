"""The folder that `bfc run` puts first on PYTHONPATH, so that every Python below it reads
`sitecustomize.py`.

    sitecustomize.py   waits for torch, and then has its allocator replaced
"""
