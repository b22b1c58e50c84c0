"""The Python interpreter's own events: exit, forks and signals; and signatures. In order:

subinterpreters.py   asked first of all: the package cannot be used there
stubs.py        signatures of compiled classes
polling.py      waiting for other threads, so that Python may free what they drop
_process.pyx    whether the interpreter is about to exit; forks, and a lock that outlives them;
                signal handlers, deferred while a sub-allocator is called
"""
