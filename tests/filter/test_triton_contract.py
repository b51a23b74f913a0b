"""Every dense design passes the contract through the Triton kernels, in Triton's interpreter (tests/conftest.py)."""

from __future__ import annotations

from typing import Any

import pytest

from membydesign.testing import DesignContract
from problems import DESIGNS

pytest.importorskip("triton")
from kernel_checks.interpreter import faster
from membydesign.filter.triton import dense as triton

assert triton.interpreting
faster()

DENSE = [name for name in DESIGNS if name.startswith("dense")]


class KernelContract(DesignContract):
    """What every way of filtering passes, here through the kernels."""

    backend = "triton"
    method = "chunk"

    test_65536_tokens_in_float32: Any = None  # the interpreter takes hours
    test_covariance_stays_symmetric_and_positive = pytest.mark.slow(
        DesignContract.test_covariance_stays_symmetric_and_positive
    )
    test_gradients = pytest.mark.slow(DesignContract.test_gradients)


class TestKernelScalar(KernelContract):
    design = DESIGNS["dense-scalar"]


for _name in DENSE:
    _title = "TestKernel" + "".join(part.capitalize() for part in _name.replace("-", "_").split("_"))
    globals()[_title] = pytest.mark.slow(type(_title, (KernelContract,), {"design": DESIGNS[_name]}))
