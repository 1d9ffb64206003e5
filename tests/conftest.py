"""What all tests share: hypothesis profiles, and a hint where the package is not installed."""

import os

import pytest
from hypothesis import HealthCheck, settings

try:
    from infonce.kernels import blocks  # noqa: F401  (only an installed infonce has its kernels)
except ImportError as error:
    raise pytest.UsageError(
        f"infonce is not installed ({error}): run  python -m pip install -e '.[test]'  first"
    ) from None

pytest.register_assert_rewrite("command_line", "gpu_problems", "reference_problems")

settings.register_profile(
    "default", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
