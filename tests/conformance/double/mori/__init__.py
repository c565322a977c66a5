"""A double of MoRI's Python package in plain Python, as much of it as SGLang uses.

Descriptors have MoRI's byte layout: arrays of msgpack, in the order of the `FIELDS` of the classes
in `mori.cpp`. Bytes move by `memmove` within a process and by `process_vm_writev` between processes
of one user on one host; the pid comes from the engine descriptor that was registered.
"""

__version__ = "double"
