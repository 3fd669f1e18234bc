"""Expert-as-a-Service for PyTorch: Mixture-of-Experts layers whose experts live elsewhere.

Each public name is loaded on first use, so that importing the package costs nothing.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "Access": "access",
    "AccessDenied": "errors",
    "AnomalyError": "errors",
    "CapturedStep": "device.captured_step",
    "CheckpointError": "errors",
    "Client": "client",
    "ClientConfig": "config",
    "ConfigError": "errors",
    "CudaIpcTransport": "comm.cuda_ipc",
    "DeviceClient": "device.client",
    "DeviceServer": "device.server",
    "DoubleBatchOverlap": "dbo",
    "EaasError": "errors",
    "ExpertPool": "experts",
    "ExpertServer": "server",
    "ExpertSlab": "device.expert_slab",
    "ExpertUnavailable": "errors",
    "ExpertWeights": "experts",
    "GroupLimitedRouter": "routers",
    "HandshakeRefused": "errors",
    "InferenceOnlyError": "errors",
    "LoopbackTransport": "comm.loopback",
    "ModelInfo": "monitor.announcement",
    "MonitorConfig": "config",
    "NvshmemConfig": "comm.nvshmem",
    "NvshmemTransport": "comm.nvshmem_transport",
    "NvshmemWorld": "comm.nvshmem",
    "PairSpec": "protocol.layout",
    "PeerGone": "errors",
    "PeerTimeout": "errors",
    "Placement": "placement",
    "RemoteExperts": "remote_moe",
    "RemoteMoE": "remote_moe",
    "RequestRefused": "errors",
    "ServerConfig": "config",
    "SharedMemoryTransport": "comm.shared_memory",
    "SoftmaxTopKRouter": "routers",
    "StalePeer": "errors",
    "TransportError": "errors",
    "TurnTimeout": "errors",
    "check_repeatable": "device.captured_step",
    "join_batches": "batch_splitting",
    "load_client": "models.load",
    "load_local": "models.load",
    "share": "placement",
    "split_batch": "batch_splitting",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
