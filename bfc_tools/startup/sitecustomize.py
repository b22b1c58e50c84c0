"""Read at the start by each Python below `bfc run`, also by one that has no bfc or no torch, and by
old ones: so it imports nothing, has no annotations, and does nothing before torch is imported."""

import os
import sys


class AfterTorch(object):  # noqa: UP004  # old Pythons
    """Finds torch where the others find it. It acts once that has been imported."""

    for_bfc = True

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                self.follow(spec.loader)
                return spec
        return None

    def follow(self, loader):
        """Has a loader call `serve`. It was made for this search, which may not lead to an import
        at all: programs look whether torch is there."""
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module):
            del loader.exec_module
            execute(module)
            serve(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module


def serve(torch):
    """Puts pools in the place of the allocator of torch, if this Python has bfc."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    package = find_spec("bfc")
    if package is None or find_spec("bfc_tools") is None or not hasattr(torch, "version"):
        return
    # It may be a checkout, which another Python has compiled for itself.
    if PathFinder.find_spec("bfc._core", package.submodule_search_locations) is None:
        return
    from bfc_tools.cli.serving import serve_as_told

    serve_as_told()


def run_the_other():
    """Another sitecustomize stands further down the path, perhaps, and would have been read."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [it for it in sys.path if os.path.abspath(it or os.curdir) != here]
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        sys.modules["sitecustomize"] = ours
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise


if os.environ.get("BFC_RUN") and sys.version_info >= (3, 11):
    if not any(getattr(it, "for_bfc", False) for it in sys.meta_path):
        sys.meta_path.insert(0, AfterTorch())

if __name__ == "sitecustomize":
    run_the_other()
