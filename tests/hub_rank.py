"""`pptrain` as on a machine of its own: `python tests/hub_rank.py FOLDER ARGUMENTS...`, a cache for each rank."""

import os
import sys

os.environ["HF_HOME"] = os.path.join(sys.argv[1], f"rank{os.environ.get('MLX_RANK', '0')}")
from pptrain.cli import script  # huggingface_hub reads its environment when it is imported

del sys.argv[1]
script()
