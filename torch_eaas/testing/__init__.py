"""In-process clusters, experts of a planned delay, and planned faults: for users' tests too."""

from torch_eaas.testing.cluster import DelayedExperts, LocalCluster, Weights, random_experts
from torch_eaas.testing.faults import Fault, FaultKind, FaultPlan, Step

__all__ = [
    "DelayedExperts",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "LocalCluster",
    "Step",
    "Weights",
    "random_experts",
]
