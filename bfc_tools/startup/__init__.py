"""The folder that `bfc run` puts first on PYTHONPATH, so that every Python below it reads
`sitecustomize.py`. Where bfc is installed, a `.pth` file imports that, too, if BFC_RUN is set.

    sitecustomize.py   waits for torch, and then has its allocator replaced
"""
