"""Errors of pptrain: `[where] what is wrong, with the values. What was expected. What to do.`

`UserError` is a mistake in what was asked for, and the CLI shows it in one line; the others say that something that
pptrain promises did not hold.
"""


class PptrainError(Exception):
    """Any error that pptrain raises on purpose."""

    exit_code = 1
    """What the command line exits with."""


class UserError(PptrainError):
    """A mistake in what was asked for."""

    exit_code = 2


class ConfigError(UserError):
    """A flag, a YAML key or an argument that is unknown or has a value that it cannot have."""


class PartitionError(UserError):
    """Layers that cannot be divided into the stages asked for."""


class ModelError(UserError):
    """A model that cannot be loaded, cut or trained."""


class DataError(UserError):
    """Rows of a data set that cannot be trained on."""


class CheckpointError(UserError):
    """A checkpoint that cannot be used: a file of it is damaged, short, foreign, or not there."""


class BatchError(UserError):
    """A batch that cannot be cut into the microbatches asked for, or has nothing to learn from."""


class NotationError(UserError):
    """A program's text that cannot be read."""


class ScheduleError(PptrainError):
    """A schedule or program that breaks a rule of its kind, or an action out of order."""


class RanksDisagree(PptrainError):
    """Ranks that were started with different settings."""

    exit_code = 5


class SaveError(PptrainError):
    """Something that was trained and cannot be written, its disk being full for instance."""


class NonFiniteError(PptrainError):
    """A loss or gradient that is not a finite number; no state was changed."""

    num_asking = 0
    """How many ranks ask for the run to stop after this step."""
