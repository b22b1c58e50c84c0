"""The cases, one a file, each named after its thread: pytorch_193400.py is pytorch#193400, and a
second case of that thread is pytorch_193400_b.py. No case imports another. In order:

    *.py    a case each
"""
