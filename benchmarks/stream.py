"""Time and memory of streaming from large data files, from the start and resumed far behind it.

    python benchmarks/stream.py [--rows 1000000] [--shards 20] [--buffer 1000] [--seed 0]

Writes synthetic rows to a temporary folder as JSON lines, the same in gzip, and parquet shards,
and streams each in processes of their own: the first 100 rows; 100 rows from nine tenths of the
file on; 100 rows from there in the second pass, for which the whole file is counted first. `all` is
every 10th row of a pass, as one of 10 loader workers reads it. `peak` is the highest resident
memory above what the imports took.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import resident, write


def write_shards(lines: Path, folder: Path, shards: int, group: int = 10_000) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in lines.open()]
    folder.mkdir()
    size = -(-len(rows) // shards)
    for i, start in enumerate(range(0, len(rows), size)):
        table = pa.Table.from_pylist(rows[start : start + size])
        pq.write_table(table, folder / f"train-{i:05d}.parquet", row_group_size=group)


def measure(path: str, first: int, count: int, step: int, buffer: int, seed: int) -> dict:
    import vireo.data.arrow_file  # noqa: F401 (loaded for parquet only, so not part of `open`)
    from vireo.data.stream import open_stream

    before, start = resident("VmRSS"), time.perf_counter()
    stream = open_stream([path], seed=seed, buffer=buffer)
    opened = time.perf_counter()
    for i in range(first, first + count * step, step):
        assert stream[i].turns
    seconds = time.perf_counter() - opened
    peak = resident("VmHWM") - before
    return {"open": opened - start, "read": seconds, "peak": peak / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--buffer", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        path, *numbers = args.measure
        print(json.dumps(measure(path, *map(int, numbers), args.buffer, args.seed)))
        return
    with tempfile.TemporaryDirectory() as name:
        lines, packed, shards = (Path(name) / n for n in ("rows.jsonl", "rows.jsonl.gz", "shards"))
        write(lines, args.rows, True, args.seed)
        with lines.open("rb") as source, gzip.open(packed, "wb", 1) as target:
            shutil.copyfileobj(source, target)
        write_shards(lines, shards, args.shards)
        late = args.rows * 9 // 10
        jobs = {
            "start": (0, 100, 1),
            "9/10": (late, 100, 1),
            "19/10": (args.rows + late, 100, 1),
            "all": (0, args.rows // 10, 10),
        }
        print("container      from   rows  open s  rows s  peak MB")
        for path in (lines, packed, shards):
            for job, numbers in jobs.items():
                command = [sys.executable, __file__, "--buffer", str(args.buffer), "--measure"]
                command += [str(path), *map(str, numbers)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found = json.loads(done.stdout)
                print(
                    f"{path.name:14} {job:>5} {numbers[1]:6d}  {found['open']:6.3f}"
                    f"  {found['read']:6.2f}  {found['peak']:7.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
