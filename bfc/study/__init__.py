"""What allocators make of a recorded run, as figures: what `bfc replay` prints, and what a program
that looks for the best settings compares. In order:

    counted.py       sources that count the regions taken from them
    experiment.py    one trace under several policies
"""
