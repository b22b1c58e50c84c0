"""Private pools, in the slow model of PyTorch's allocator [2.14, 2.18].

Numbers in brackets are the sections of the description of PyTorch's allocator.
"""

from __future__ import annotations

from bfc_slow_models.torch_device import Refused
from bfc_slow_models.torch_records import PrivatePool, Scope
from bfc_slow_models.torch_words import Pool


class PrivatePools:
    """The private pools that exist, and the scopes in which requests go to them."""

    def __init__(self) -> None:
        self.by_id: dict[Pool, PrivatePool] = {}
        self.scopes: list[Scope] = []
        #: Those that lend to requests which would fail, and those whose blocks are never split.
        self.lenders: set[Pool] = set()
        self.unsplit: set[Pool] = set()

    def taking(self, stream: int) -> PrivatePool | None:
        """That of the newest scope that takes the stream."""
        return next((scope.pool for scope in reversed(self.scopes) if scope.takes(stream)), None)

    def known(self, pool: Pool) -> PrivatePool:
        if pool not in self.by_id:
            raise Refused("internal", "no such pool")
        return self.by_id[pool]

    def refer(self, pool: Pool) -> PrivatePool:
        """The pool with one reference more, made if it is new."""
        if pool not in self.by_id:
            self.by_id[pool] = PrivatePool(pool)
            return self.by_id[pool]
        if not self.by_id[pool].references:
            raise Refused("internal", "the pool was released")
        self.by_id[pool].references += 1
        return self.by_id[pool]

    def begin(self, pool: Pool, streams: str | int) -> None:
        made = self.refer(pool)
        if any(scope.pool.id == pool for scope in self.scopes):
            raise Refused("internal", "its scope is open already")
        self.scopes.append(Scope(made, streams))

    def end(self, pool: Pool) -> None:
        found = [scope for scope in self.scopes if scope.pool.id == pool]
        if not found:
            raise Refused("internal", "its scope is not open")
        self.scopes.remove(found[0])
