"""How arrays get from one rank to another: a simulated world, `mx.distributed`'s ring, and JACCL.

This package knows nothing of pipelines and imports nothing of `pptrain`.
"""
