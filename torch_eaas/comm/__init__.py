"""Windows and transports, the host side: how bytes reach a peer's window. No torch.

This package and ``ops`` are strangers: neither imports the other.
"""
