"""The Python interpreter's own events: exit, forks and signals; and signatures. In order:

subinterpreters.py   asked first of all: the package cannot be used there
stubs.py        signatures of compiled classes
_exit.pyx       whether the interpreter is about to go away
_forks.pyx      what happens in a forked child; a lock that outlives a fork
_signals.pyx    signal handlers, deferred while a sub-allocator is called
"""
