from typing import final

class SharedCounter:
    def next(self) -> int: ...

@final
class Pool: ...
