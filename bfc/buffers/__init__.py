"""What users pass in, and what they get: numbers, streams, and buffers. In order:

_arguments.pyx    what users pass, read into C numbers
_current.pyx      the stream that `use_stream` chose
_owners.pyx       whose memory is allocated: what `owner` set
_exchange.pyx     what items are in each protocol, and DLPack's capsules
_buffer.pyx       a buffer, and its views
"""
