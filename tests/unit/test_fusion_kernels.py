"""The Triton kernels in Triton's interpreter: the same tests that run on a GPU, without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNEL_TESTS = Path(__file__).parents[1] / "gpu" / "test_fusion_kernels.py"


def test_kernels_agree_with_their_twins_in_the_interpreter():
    # A process of its own: Triton decides at import whether it compiles or interprets.
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--noconftest",
            "-p",
            "no:xdist",
            str(KERNEL_TESTS),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
