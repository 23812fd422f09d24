"""How far a JAX model or function is from PyTorch's: `compare` for a checkpoint, `check_op` for a function.

Needs PyTorch: `pip install "jaxfuse[parity]"`.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('jaxfuse.parity needs PyTorch; pip install "jaxfuse[parity]"', name="torch") from error

from jaxfuse.parity.check_op import OpCase, check_op
from jaxfuse.parity.compare import compare
from jaxfuse.parity.report import Report

__all__ = ["OpCase", "Report", "check_op", "compare"]
