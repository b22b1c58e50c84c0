"""Published reports of memory that behaved oddly, each reproduced in a few lines: `bfc museum`.

A case is one file. It is made from the facts of a public thread (sizes, order, settings, versions),
and holds the figures that were published there. To add one, put a file into cases/, named after
the thread, and run the tests of this folder: nothing else lists it. In order:

    figures.py      one figure, as it was published and as it is here
    pools.py        pools with the words of their libraries
    other_pools.py  pools of other libraries, as small models
    case.py         what a case says, and what it is given to run
    cases/          one file a case
    given_up/       one file a thread that could not be reproduced, with the reason
    collection.py   all cases, found and run
    pictures.py     a map of what lay where
"""
