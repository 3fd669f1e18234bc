"""The buffer protocol: layout, words, slots, pairs and requests. Integers only: no torch, no I/O.

``docs/protocol.md`` is the specification.
"""
