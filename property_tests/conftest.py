"""Settings that must stand before MLX is imported.

On a CPU each fused kernel is compiled by the system's C++ compiler in every process, which takes seconds a kernel; the
tests run without `mx.compile`, and the few that test it turn it on for themselves.
"""

import os

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
