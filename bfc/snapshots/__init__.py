"""The state of an allocator as plain values, and pictures of it. In order:

inline.py      small drawings for notebooks
text.py        a snapshot as text: what `print(snapshot)` shows
summary.py     the table of `memory_stats()`, as PyTorch lays it out
asleep.py      the report of `sleep`
tensorflow.py  a snapshot as TensorFlow's memory dump
columns.py     a snapshot as rows of numbers
snapshot.py    a snapshot and statistics as frozen values
    figures.py     the figures that monitoring shows
    leaks.py       what is live, and which lines allocated it
    memory_report.py  tables of what is in the memory
    refusal.py     the error of a request without room, with advice
"""
