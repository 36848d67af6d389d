"""`python -m vireo.train_async`: as `vireo.train`, with generation one rollout ahead."""

from __future__ import annotations

import sys

from vireo import train


def main(argv: list[str] | None = None) -> int:
    """Runs the trainer that the settings name; one without a rollout is refused."""
    return train.main(argv, needs_rollout=True)


if __name__ == "__main__":
    sys.exit(main())
