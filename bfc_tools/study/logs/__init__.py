"""Logs and error texts of programs that ran out of memory: what was refused, and why. In order:

sizes.py         sizes as other programs print them
lines.py         the lines of a log, without what loggers put around them
dump.py          what the dump of a BFC allocator says, chunk by chunk
words.py         what one line of TensorFlow's or XLA's log says
dumps.py         the dumps of one log, put together from their lines
torch_text.py    PyTorch's error text
refusal.py       one refusal, its cause, and its sentence
torch_cause.py   why PyTorch refused
bfc_cause.py     why TensorFlow or JAX refused
source.py        what one process of a log said
log.py           whole logs
side_by_side.py  several ranks' logs, and the odd one
held.py          what a log lists, as a trace
"""
