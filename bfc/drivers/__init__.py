"""All code that calls a driver: one folder for each vendor. In order:

cuda/, opencl/
"""
