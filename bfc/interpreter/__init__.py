"""What Python itself does while an allocator is at work. In order:

stubs.py        signatures of compiled classes
_exit.pyx       whether the interpreter is about to go away
_forks.pyx      what happens in a forked child; a lock that outlives a fork
_signals.pyx    signals' handlers, put off while a sub-allocator is called
"""
