"""`python -m vireo.train`: read the settings, look the trainer up, run it."""

from __future__ import annotations

import os
import sys
from functools import partial

from vireo.errors import InputError
from vireo.main import run_main
from vireo.settings import describe, load_settings
from vireo.trainers import registry

USAGE = "usage: vireo train [--config FILE] [--flag value | --section.field value] ...\n"


def main(argv: list[str] | None = None, *, needs_rollout: bool = False) -> int:
    """Runs the trainer that the settings name and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(USAGE, describe("fsdp_vlm"), sep="\n", end="")
        return 0
    return run_main(partial(_main, argv, needs_rollout), debug="--debug" in argv)


def _main(argv: list[str], needs_rollout: bool) -> int:
    settings = load_settings(argv, ahead=needs_rollout)

    def train() -> int | None:  # under its own run_main, because a file can say `debug` too
        run = registry.find(settings.trainer)
        if needs_rollout and not getattr(run, "has_rollout", False):
            raise InputError(
                f"the trainer {settings.trainer} has no rollout, so nothing in it can run "
                "asynchronously; use train in place of train_async"
            )
        if settings.cluster.by_ray and "RANK" not in os.environ:
            from vireo.cluster.run import run as place

            return place(settings)
        return run(settings)

    return run_main(train, debug=settings.debug)


if __name__ == "__main__":
    sys.exit(main())
