"""A headless browser for tests of pages: Debian's chromium, with a profile of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from PIL import Image

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: install the Debian package `chromium`"
)
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def dump_dom(page: Path, *, width: int = 1280) -> str:
    """The page's DOM as HTML, after its scripts (if any) ran for two seconds of its own time."""
    return _chromium(page, "--dump-dom", f"--window-size={width},900", "--virtual-time-budget=2000")


def screenshot(
    page: Path, out: Path, *, width: int = 1280, height: int = 900, dark: bool = False
) -> Image.Image:
    """A picture of the page's top, saved as `out`."""
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    size = f"--window-size={width},{height}"
    _chromium(page, f"--screenshot={out}", size, "--virtual-time-budget=2000", *theme)
    with Image.open(out) as image:
        return image.convert("RGB")


def with_scripts(page: Path, out: Path, script: str = "") -> Path:
    """A copy that may run scripts, with one more at its end: what a row smuggled in would run."""
    text = page.read_text(encoding="utf-8")
    assert _POLICY.search(text), "the page has no content policy"
    text = _POLICY.sub("", text).replace("</body>", f"<script>{script}</script></body>")
    out.write_text(text, encoding="utf-8")
    return out


def opened(page: Path, out: Path, *, width: int) -> tuple[str, int]:
    """The DOM of a copy that may run scripts, and how far it is wider than the window, in pixels.

    `out`: a file to work with.
    """
    script = (
        "document.documentElement.dataset.wider ="
        " document.documentElement.scrollWidth - window.innerWidth"
    )
    dom = dump_dom(with_scripts(page, out, script), width=width)
    found = re.search(r'data-wider="(-?\d+)"', dom)
    assert found, dom[:500]
    return dom, int(found[1])


def count_pixels(image: Image.Image, colour: str, tolerance: int = 3) -> int:
    """How many pixels have a colour such as #c9f2d6."""
    wanted = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return sum(
        count
        for count, pixel in image.getcolors(1 << 24)
        if all(abs(a - b) <= tolerance for a, b in zip(pixel, wanted))
    )


def _chromium(page: Path, *options: str, timeout: float = 60) -> str:
    """Output of one run; the whole process group ends with it, whatever happens."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += ["--disable-dev-shm-usage", f"--user-data-dir={profile}", *options]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        process = subprocess.Popen(
            [*command, page.resolve().as_uri()],
            env={**os.environ, "HOME": profile, "XDG_CONFIG_HOME": profile},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        assert process.returncode == 0, err.decode(errors="replace")[-2000:]
        return out.decode("utf-8")
