"""The server's arithmetic. Each op has a plain twin in ``reference`` that defines it.

This package and ``comm`` are strangers: neither imports the other.
"""
