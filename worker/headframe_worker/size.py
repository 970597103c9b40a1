"""Sizes as people read them."""

from __future__ import annotations


def human_bytes(size_bytes: float) -> str:
    """`512 B`, `1.5 GiB`: binary units, two to four digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} PiB"


def human_flops(flops_per_second: float) -> str:
    """`4.2 GFLOP/s`, `787.0 TFLOP/s`: powers of 1000."""
    value = flops_per_second / 1e9
    return f"{value:,.1f} GFLOP/s" if value < 1000 else f"{value / 1000:,.1f} TFLOP/s"
