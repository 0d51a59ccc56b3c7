"""The command line. It alone prints to the user and exits; a user's mistake is one message and never a traceback.

Exit codes: 0 done; 2 the user's mistake; 3 a peer was lost; 4 a peer was silent for too long; 5 ranks were started with
different settings; 130 interrupted; 1 anything else.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from pptrain.errors import PptrainError
from transports import TransportError, report_of

_USAGE = """usage: pptrain train [options]     fine-tune a model that is cut into pipeline stages
       pptrain train --demo        the same on a small model made on the spot; needs no network and no files
       pptrain train --help        every option
       pptrain schedule NAME [options]
                                   a schedule on paper: drawn, timed, proven, exported; or a file checked
       pptrain launch [options] -- pptrain train [options]
                                   start it on several machines; takes the options of mlx.launch, and ends with the
                                   exit code of the rank that failed first
       pptrain doctor [options]    what this machine is; under a launcher, whether its links can be relied on
       pptrain plan [options]      how to cut a model over given machines, which schedule fits, and what to run
       pptrain validate TARGET...  can this architecture be cut? Every cut of a tiny model against one device
       pptrain report DIR          a run's directory as one page: curves, memory, the timeline of a step
       pptrain --version"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except (PptrainError, TransportError) as error:
        print(report_of(error, error.exit_code), file=sys.stderr, flush=True)
        return error.exit_code


def script() -> NoReturn:
    """The program: `main`, and the end of the process.

    After a failure at once: MLX's threads may be in the middle of a communication with a rank that has ended, and its
    own clean-up would abort the process, with another exit code.
    """
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit()


def _dispatch(argv: Sequence[str]) -> int:
    match argv:
        case ["--version", *_]:
            print(f"pptrain {version('pptrain')} (mlx {version('mlx')}, mlx-lm {version('mlx-lm')})")
            return 0
        case ["train", *options]:
            return _train(options)
        case ["schedule", *options]:
            from pptrain import show

            return show.run(options)
        case ["launch", *options]:
            from pptrain import launch

            return launch.run(options)
        case ["doctor", *options]:
            from pptrain import doctor

            return doctor.run(options)
        case ["plan", *options]:
            return _plan(options)
        case ["validate", *options]:
            from pptrain import validate_run

            return validate_run.run(options)
        case ["report", *options]:
            from pptrain import report_run

            return report_run.run(options)
        case ["--help" | "-h", *_]:
            print(_USAGE)
            return 0
        case _:
            print(_USAGE, file=sys.stderr)
            return 2


def _plan(options: Sequence[str]) -> int:
    from pptrain import plan_run

    _compile_on_a_gpu_only()
    return plan_run.run(options)


def _compile_on_a_gpu_only() -> None:
    """On a CPU each fused kernel is compiled by the system's C++ compiler in every process, which never pays."""
    import mlx.core as mx

    if mx.default_device() == mx.cpu:
        mx.disable_compile()


def _train(options: Sequence[str]) -> int:
    # Imported here, so that --version and --help answer at once.
    from pptrain import config, demo_run, job

    _compile_on_a_gpu_only()
    if "--demo" in options:
        return demo_run.run(options)
    job.execute(config.parse(options), command=["pptrain", "train", *options])
    return 0
