"""Tests the source of `mapped_file.py` against the contract of sources, and under an allocator.

The latter is compared with the slow model of TensorFlow's rules, in histories of Hypothesis.

Needs no GPU, but `pip install 'bfc-allocator[testing]'`.

    $ PYTHONPATH=examples python -m pytest -q -p no:cacheprovider examples/fuzz_a_source.py
    ... passed...
"""

import hypothesis
from mapped_file import MappedFile

import bfc
from bfc.testing import AllocatorMachine, SubAllocatorContract


class TestContract(SubAllocatorContract):
    def make(self) -> bfc.SubAllocator:
        return MappedFile("64 MiB")


class Fuzzed(AllocatorMachine):
    def make(self) -> bfc.Allocator:
        return bfc.BFCAllocator(MappedFile("64 MiB"), allow_growth=True)


TestFuzzed = Fuzzed.TestCase
TestFuzzed.settings = hypothesis.settings(TestFuzzed.settings, max_examples=20)
