"""The arguments that users pass, and the buffers that they get. In order:

_arguments.pyx    arguments, converted to C numbers
_scopes.pyx       the stream that `use_stream` chose, and the owner that `owner` set
_exchange.pyx     the types of items in each protocol, and DLPack's capsules
_buffer.pyx       a buffer, and its views
"""
