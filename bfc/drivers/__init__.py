"""All that calls a driver: one folder a vendor. In order:

cuda/, opencl/
"""
