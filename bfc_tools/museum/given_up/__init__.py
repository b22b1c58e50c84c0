"""Threads that could not be reproduced, one a file, each with the reason. In order:

*.py    a thread each
"""
