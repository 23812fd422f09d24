"""What this machine computes on."""

import os
import re
import shutil
import subprocess

import jax

from jaxfuse.errors import JaxfuseError


def start() -> None:
    """Starts JAX's backend.

    Raises:
        JaxfuseError: when it cannot start, as with a JAX_PLATFORMS that this machine does not have.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX raises both for a platform that is not there
        chosen = f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}" if "JAX_PLATFORMS" in os.environ else "this machine"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise JaxfuseError(
            f"JAX cannot start on {chosen} ({reason}); unset JAX_PLATFORMS, or mend the device"
        ) from error


def describe() -> str:
    """The device that JAX uses, as "NVIDIA H200 (gpu)"."""
    device = jax.devices()[0]
    return f"{device.device_kind} ({device.platform})"


def unused_gpu() -> str | None:
    """A note when the machine has an NVIDIA GPU that JAX does not use, else None."""
    if jax.default_backend() != "cpu":
        return None
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None  # no working driver, so no GPU to speak of
    match = re.match(r"(.+), (\d+)\.", found)
    if match is None:
        return None
    # CUDA 13 needs driver 580 (NVIDIA, CUDA compatibility).
    extra = "cuda13" if int(match[2]) >= 580 else "cuda12"
    return (
        f"this machine has an {match[1]}, but JAX runs on the CPU; install the GPU's JAX with "
        f"`pip install -e '.[{extra}]'`"
    )
