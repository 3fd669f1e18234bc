"""In-process clusters, planned experts and faults, forbidden syncs: for users' tests too."""

from torch_eaas.testing.cluster import LocalCluster
from torch_eaas.testing.experts import DelayedExperts, Weights, random_experts
from torch_eaas.testing.faults import Fault, FaultKind, FaultPlan, Step
from torch_eaas.testing.syncs import forbid_syncs

__all__ = [
    "DelayedExperts",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "LocalCluster",
    "Step",
    "Weights",
    "forbid_syncs",
    "random_experts",
]
