"""Experiments with recorded runs: what one run needs under several policies. `bfc replay` prints
such figures, and a program that looks for the best settings compares them. In order:

    counted.py       sources that count the calls made to them
    experiment.py    one trace under several policies
"""
