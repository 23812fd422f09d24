"""What every test runs under: no network, the CPU unless marked gpu, strict promotion, fixed hypothesis examples."""

import os
from collections.abc import Iterator

# Read by transformers and huggingface_hub when they are imported, so before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None)
hypothesis.settings.load_profile("deterministic")

# So that a failed assert of theirs says what it compared, as a test module's does.
pytest.register_assert_rewrite("interpreter", "opaque_ops")


def pytest_configure() -> None:
    """Make JAX raise where it would widen a dtype or broadcast a rank without being asked.

    A user may have set either, and then the package has to work; nobody needs to have set them.
    """
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu, with the reason, where JAX has no GPU."""
    for item in items:
        if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
            reason = f"needs an NVIDIA GPU that JAX can use; JAX runs on {jax.default_backend()} here"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test on the CPU, its fixtures too, unless it is marked gpu: a GPU rounds sums in another order."""
    if item.get_closest_marker("gpu"):
        return (yield)
    with jax.default_device(jax.devices("cpu")[0]):
        return (yield)
