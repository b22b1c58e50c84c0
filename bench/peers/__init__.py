"""The compiled originals that `bfc` reproduces, run side by side with it on a machine with no GPU.

Each module here downloads one published wheel when asked for, keeps the few files it needs under
`build/peers/`, and compiles a small C shim next to them. Nothing here is imported by `bfc`.
"""
