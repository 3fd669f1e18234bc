"""The HTTP control plane: who is alive, who holds what; never on the data path."""
