"""`python -m tests.functional [NAME...]`: run cases, print a table, exit 1 if a bound broke.

`--measure` runs three seeds of each instead and writes what they gave, and bounds from it, into
the case's file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.functional import runner
from tests.functional.bounds import measured

SEEDS = (0, 1, 2)


def main(words: Sequence[str] | None = None, command: Sequence[str] = runner.VIREO) -> int:
    """Exit status: 0 all kept, 1 something broken, 2 (from argparse) an unknown name."""
    parser = argparse.ArgumentParser(prog="python -m tests.functional", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(runner.names()))
    parser.add_argument("--measure", action="store_true", help="write bounds anew")
    given = parser.parse_args(words)
    for name in given.names:
        if name not in runner.names():
            parser.error(f"no case is called {name!r}; there are {', '.join(runner.names())}")
    broken = 0
    for name in given.names or runner.names():
        with tempfile.TemporaryDirectory(prefix="functional-") as folder:
            if given.measure:
                _measure(name, Path(folder))
            else:
                broken += _show(name, Path(folder), command)
    if not given.measure:
        print(f"{broken} bounds broken" if broken else "all bounds kept")
    return int(broken > 0)


def _show(name: str, out: Path, command: Sequence[str]) -> int:
    began, case = time.perf_counter(), runner.load(name)
    found = runner.findings(case, runner.run(case, out, command=command))
    print(f"{name} ({time.perf_counter() - began:.0f} s)")
    for f in found:
        said = "ok" if f.ok else "BROKEN"
        print(f"  {f.name:<52} {f.found:>13.9g}  {f.bound:<32} {said}", flush=True)
    return sum(not f.ok for f in found)


def _measure(name: str, out: Path) -> None:
    case = runner.load(name)
    made = [runner.run(case, out / str(seed), seed) for seed in SEEDS]
    for phase in runner.PHASES:
        bounds = [measured(b, [run[phase] for run in made]) for b in case[phase]["bounds"]]
        case[phase]["bounds"] = bounds
        for bound in bounds:
            print(f"{name} {phase} {json.dumps(bound)}", flush=True)
    head = json.dumps({n: v for n, v in case.items() if n not in runner.PHASES}, indent=1)
    (runner.CASES / f"{name}.json").write_text(_written(case, head))


def _written(case: dict, head: str) -> str:
    """JSON with a bound a line, so that a new measurement reads well as a difference."""
    parts = [head.removesuffix("\n}")]
    for phase in runner.PHASES:
        bounds = ",\n   ".join(json.dumps(bound) for bound in case[phase]["bounds"])
        args = json.dumps(case[phase]["args"])
        parts.append(f' "{phase}": {{\n  "args": {args},\n  "bounds": [\n   {bounds}\n  ]\n }}')
    return ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
