"""The emulated CUDA driver: `bfc.testing.cuda_emulator` is its public name, and describes it.

Of bfc it needs where compiled files are kept, and an error. The sources in C stand beside these
files. In order:


    symbols.h
    emulator.h
    library.py      compiles and loads it
    driver.py       its controls
"""

from bfc_cuda_emulator.driver import ERRORS as ERRORS
from bfc_cuda_emulator.driver import Allocation as Allocation
from bfc_cuda_emulator.driver import Call as Call
from bfc_cuda_emulator.driver import Driver as Driver
from bfc_cuda_emulator.driver import load as load
from bfc_cuda_emulator.driver import preamble as preamble
from bfc_cuda_emulator.driver import script as script
from bfc_cuda_emulator.library import build as build
