"""`python -m pptrain` is `pptrain`."""

from pptrain.cli import script

script()
