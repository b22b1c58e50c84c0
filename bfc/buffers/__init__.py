"""The arguments that users pass, and the buffers that they get. In order:

_arguments.pyx    arguments, converted to C numbers
_current.pyx      the stream that `use_stream` chose
_owners.pyx       the owner that `owner` set
_exchange.pyx     the types of items in each protocol, and DLPack's capsules
_buffer.pyx       a buffer, and its views
"""
