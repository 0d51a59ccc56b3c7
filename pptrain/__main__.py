"""`python -m pptrain` is `pptrain`."""

import sys

from pptrain.cli import main

sys.exit(main())
