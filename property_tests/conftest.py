"""Settings that must stand before MLX is imported.

On a CPU each fused kernel is compiled by the system's C++ compiler in every process, which takes seconds a kernel; the
tests run without `mx.compile`, and the few that test it turn it on for themselves.
"""

import os

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

from hypothesis import settings

# An example builds a model, so how long one takes says nothing. The line that replays a failure is always printed.
settings.register_profile("dev", max_examples=50, deadline=None, print_blob=True)
settings.register_profile("ci", max_examples=200, deadline=None, print_blob=True, derandomize=True)
settings.register_profile("nightly", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
