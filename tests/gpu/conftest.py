"""What must be set before CUDA starts, for all tests that need a GPU."""

from __future__ import annotations

import os

# the streams of a client and its server in one process must not share a hardware queue
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
