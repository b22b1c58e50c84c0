"""A source that stops in one call, for a script that forks meanwhile (`own_interpreter.run`)."""

from __future__ import annotations

STOPPED = """
class Stopped(bfc.SimulatedSubAllocator):
    '''Stops in one call, before or after the work.'''
    kind, is_after = None, False
    inside, go = threading.Event(), threading.Event()

    def around(self, kind, call, *arguments):
        hit, here = kind == self.kind, self.is_after
        if hit:
            Stopped.kind = None
        if hit and not here:
            self.stop()
        answer = call(self, *arguments)
        if hit and here:
            self.stop()
        return answer

    def stop(self):
        self.inside.set()
        self.go.wait(30)

KINDS = ["reserve", "create", "map", "set_access", "unmap", "release", "unreserve", "wait"]
for name in KINDS:
    def method(self, *arguments, name=name):
        return self.around(name, getattr(bfc.SimulatedSubAllocator, name), *arguments)
    setattr(Stopped, name, method)
"""
