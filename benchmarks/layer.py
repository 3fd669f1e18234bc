"""What a layer costs when its experts are remote: calls, waits, and the client's bookkeeping."""

from __future__ import annotations

import torch

from benchmarks import bookkeeping, layer_calls, waiting
from benchmarks.harness import Options
from torch_eaas.cli.report import Report

CHECKS = (
    (
        "T64_vs_grouped_mm",
        "rows['bf16','T64','remote'].p50_us / rows['bf16','T64','grouped_mm'].p50_us",
        "<= 1.15",
    ),
    (
        "T256_vs_grouped_mm",
        "rows['bf16','T256','remote'].p50_us / rows['bf16','T256','grouped_mm'].p50_us",
        "<= 1.15",
    ),
    (
        "T1_extra_us",
        "rows['bf16','T1','remote'].p50_us - rows['bf16','T1','grouped_mm'].p50_us",
        "<= 350",
    ),
)


def run(options: Options) -> Report:
    """Measure all three parts."""
    torch.set_num_threads(1)
    report = Report(name="layer")
    bookkeeping.measure(report, options)
    waiting.measure(report, options)
    layer_calls.measure(report, options)
    if not options.quick:
        for name, formula, target in CHECKS:
            report.add_check(name, formula, target)
    return report
