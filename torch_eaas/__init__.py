"""Expert-as-a-Service for PyTorch: Mixture-of-Experts layers whose experts live elsewhere."""

__version__ = "0.1.0"
