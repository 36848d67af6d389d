"""Time and memory of opening a large data file and reading a first batch from it.

    python benchmarks/rows.py [--rows 100000 1000000] [--seed 0]

Writes synthetic JSON lines to a temporary folder, with and without an image path, and opens each
file in a process of its own. `peak` is the highest resident memory above what the imports took.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QUESTIONS = (
    "What is shown in the picture, and what colour is the card that lies in the middle of it?",
    "How many cards lie on the table, and which of them is nearest to the person who looks at it?",
)
ANSWER = "It shows a red card on a white table; {} others lie behind it, and none of them is open."


def write(path: Path, rows: int, images: bool, seed: int) -> None:
    draw = random.Random(seed)
    with path.open("w") as file:
        for i in range(rows):
            question = draw.choice(QUESTIONS)
            row: dict = {"id": f"{i:012d}"}
            if images:
                row["image"] = f"images/{i % 1000:03d}/{i:012d}.jpg"
                question = "<image>\n" + question
            answer = ANSWER.format(draw.randrange(100))
            row["conversations"] = [
                {"from": "human", "value": question},
                {"from": "gpt", "value": answer},
            ]
            file.write(json.dumps(row) + "\n")


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def measure(path: str, seed: int) -> dict[str, float]:
    from vireo.data.readers import open_rows

    before = resident("VmRSS")
    start, used = time.perf_counter(), time.process_time()
    rows = open_rows(path)
    opened, used = time.perf_counter() - start, time.process_time() - used
    start = time.perf_counter()
    draw = random.Random(seed)
    batch = [rows[draw.randrange(len(rows))] for _ in range(64)]
    first = time.perf_counter() - start
    assert len(batch) == 64
    peak = (resident("VmHWM") - before) / Path(path).stat().st_size
    figures = {"open": opened, "cpu": used, "batch": first, "peak": peak}
    if not batch[0].images:  # the pictures do not exist, so only text rows can be rendered
        figures |= first_step(rows, seed)
    return figures


def first_step(rows, seed: int) -> dict[str, float]:
    """Seconds to the first 64 rendered examples of a shuffled epoch, as a trainer gets them."""
    from vireo.data.loader import Plan, StepLoader
    from vireo.data.render import Renderer
    from vireo.families.tiny import build

    with tempfile.TemporaryDirectory() as folder:
        renderer = Renderer(str(build("qwen2_5_vl", folder, size="test")))
    before, start = resident("VmRSS"), time.perf_counter()
    plan = Plan(len(rows), 64, seed=seed)
    step = next(iter(StepLoader(rows, renderer, plan, stop=len(rows), workers=2)))
    seconds = time.perf_counter() - start
    assert len(step.examples) == 64
    return {"step": seconds, "step MB": (resident("VmRSS") - before) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.seed)))
        return
    print(
        "   rows  images  file MB  open s  of it CPU s  64 rows s  peak / file  "
        "first step s  its MB"
    )
    with tempfile.TemporaryDirectory() as folder:
        for rows in args.rows:
            for images in (True, False):
                path = Path(folder) / "rows.jsonl"
                write(path, rows, images, args.seed)
                command = [sys.executable, __file__, "--measure", str(path)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                figures = json.loads(done.stdout)
                print(
                    f"{rows:7d}  {'yes' if images else 'no':>6}  {path.stat().st_size / 1e6:7.0f}"
                    f"  {figures['open']:6.1f}  {figures['cpu']:11.1f}  {figures['batch']:9.3f}"
                    f"  {figures['peak']:11.2f}"
                    f"  {figures.get('step', math.nan):12.2f}  {figures.get('step MB', 0):6.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
