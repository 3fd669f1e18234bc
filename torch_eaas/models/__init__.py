"""Checkpoints as published: what a server reads of its experts, and a client of the rest."""
