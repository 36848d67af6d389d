"""Every command and every Python block of README.md and docs/ runs as it stands there.

A page's ```bash blocks run in order in one new folder, then its ```python blocks as one program. A
block that cannot run in a test has a comment above it, `<!-- not run: why -->`, which says so to
whoever reads the source. Commands in any other block are an error: nothing would try them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch import ROOT, environment

PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
# Run by `make test-all`: what these pages do is tested elsewhere too.
SLOW = {
    "README.md",
    *(f"docs/{name}.md" for name in ("training", "data-tools", "settings", "checkpoints")),
    *(
        f"docs/{name}.md"
        for name in (
            "graft",
            "families",
            "lora",
            "export",
            "rollout",
            "mismatch",
            "grpo",
            "cluster",
        )
    ),
}
LIMIT_S = 300  # of one block, on a machine that has other work
COMMAND = re.compile(r"\s*(?:\$ )?(?:vireo|torchrun|python|pip|make|hf|git) ")
# What the commands on the pages mean: this checkout, with the interpreter of the tests.
RUN = {
    "python": "",
    "vireo": "-m vireo",
    # Pages that run side by side would all want torchrun's one default port.
    "torchrun": "-m torch.distributed.run --standalone",
}


@dataclass(frozen=True)
class Block:
    line: int  # of its fence, from 1
    language: str
    text: str
    not_run: str | None  # the reason in the comment above it


def blocks(markdown: str) -> list[Block]:
    found, last, lines = [], "", iter(enumerate(markdown.splitlines(), 1))
    for number, line in lines:
        if line.startswith("```"):
            inside = []
            for _, text in lines:
                if text.startswith("```"):
                    break
                inside.append(text)
            reason = re.fullmatch(r"<!-- not run: (.+) -->", last)
            why = reason[1] if reason else None
            found.append(Block(number, line[3:].strip(), "\n".join(inside), why))
        last = line
    return found


def page(name: str) -> list[Block]:
    return blocks((ROOT / name).read_text())


def run(block: Block, folder: Path, path: str) -> None:
    """Run a bash block; AssertionError with what it printed if a command of it fails."""
    # A proxy that is not there: what asks for the network fails at once.
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    with (folder / "printed.txt").open("w+") as out:
        process = subprocess.Popen(
            ["bash", "-euxo", "pipefail", "-c", block.text],
            env=environment(PATH=path, **nowhere),
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = f"none after {LIMIT_S} s"
            for number in (signal.SIGTERM, signal.SIGKILL):  # torchrun passes the first one on
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                time.sleep(5)
        out.seek(0)
        assert code == 0, f"line {block.line}, exit code {code}:\n{out.read()[-6000:]}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bin")
    for name, arguments in RUN.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PAGES],
)
def test_the_commands_and_programs_of_a_page_run(name, path, tmp_path, monkeypatch) -> None:
    chosen = [block for block in page(name) if block.not_run is None]
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    for block in chosen:
        if block.language == "bash":
            run(block, tmp_path, path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in chosen:
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, str(ROOT / name), "exec"), names)


@pytest.mark.parametrize("name", PAGES)
def test_no_command_is_in_a_block_that_nothing_runs(name: str) -> None:
    for block in page(name):
        if block.language != "bash":
            at = f"{name} line {block.line}"
            assert block.not_run is None, f"{at}: only a bash block can say that it is not run"
            commands = [line for line in block.text.splitlines() if COMMAND.match(line)]
            assert not commands, f"{at}: {commands[0]!r} belongs in a ```bash block"


@pytest.mark.parametrize("name", ["data", "settings", "lora", "checkpoints", "export", "rollout"])
def test_each_guide_has_commands_that_are_run(name: str) -> None:
    found = [b for b in page(f"docs/{name}.md") if b.language == "bash" and b.not_run is None]
    assert any(re.search(r"^vireo ", block.text, re.MULTILINE) for block in found)


def test_blocks_are_found_with_the_reason_above_them() -> None:
    text = "a\n```bash\none\n\ntwo\n```\n<!-- not run: why -->\n```bash\nthree\n```\n\n```\nx\n```"
    assert blocks(text) == [
        Block(2, "bash", "one\n\ntwo", None),
        Block(8, "bash", "three", "why"),
        Block(12, "", "x", None),
    ]


def test_a_block_fails_with_the_command_that_failed(path: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)line 7, exit code 2.*\+ python -c .*no such"):
        run(Block(7, "bash", "python -c 'exit(\"no such\")' || exit 2\ntrue", None), tmp_path, path)
    run(Block(7, "bash", "vireo --version | grep vireo", None), tmp_path, path)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        goal = (ROOT / name).parent / file if file else ROOT / name
        assert goal.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", goal.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
