"""`vireo rollout`: samples of a data file in a folder, gone on with after a kill."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch import ROOT, environment
from tests.rows import picture
from tests.stub_engine import StubEngine, number
from tests.tiny_models import assistant, noise, renderer, row, tiny, user
from vireo import cli
from vireo.data import references
from vireo.data.conversation import ImageRef, read_rows
from vireo.data.images import load_image
from vireo.data.rows import Allowed
from vireo.errors import InputError, RowError
from vireo.rollout import dump, run
from vireo.rollout.engine import EngineGone
from vireo.settings.rollout import EngineSettings, SamplingSettings

FAMILY = "qwen2_5_vl"
EMBEDDED = EngineSettings()


def write_prompts(folder: Path, count: int, images: Any = None) -> Path:
    """Rows without an answer, with one picture each."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(count):
        picture(i).save(folder / f"{i}.png")
        image = images[i] if images else f"{i}.png"
        turns = [{"role": "user", "content": f"<image>Number {i}?"}]
        rows.append({"id": i, "image": image, "messages": turns, "answer": "x"})
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    """The engine that commands get in this test."""
    engine = StubEngine()
    monkeypatch.setattr(run, "open_engine", lambda *_, **__: engine)
    return engine


def roll(prompts: Path, out: Path, n: int = 2, **options: Any) -> dict[str, Any]:
    engine = options.pop("engine", EMBEDDED)
    sampling = SamplingSettings(n=n, max_new_tokens=8)
    return run.rollout(
        model=tiny(FAMILY),
        prompts=str(prompts),
        out=str(out),
        engine=engine,
        sampling=sampling,
        **options,
    )


def responses(out: Path) -> dict[tuple[str, int], list[int]]:
    """By group and index; AssertionError if one is there twice."""
    samples = dump.read(out / "samples.jsonl")
    found = {(sample.group, sample.index): sample.response_ids for sample in samples}
    assert len(found) == len(samples)
    return found


def test_the_command_writes_samples_pictures_and_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = write_prompts(tmp_path / "data", 5), tmp_path / "out"
    words = ["--model", tiny(FAMILY), "--prompts", str(prompts), "--out", str(out), "--n=2"]
    words += ["--limit=3", "--max-new-tokens=6", "--reward=exact_match"]
    assert cli.main(["rollout", *words]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == json.loads((out / "summary.json").read_text())
    samples = dump.read(out / "samples.jsonl")
    assert len(samples) == 6
    lengths = [len(sample.response_ids) for sample in samples]
    assert summary["samples"] == 6
    assert summary["prompts"] == 3
    assert summary["tokens"] == sum(lengths)
    assert summary["prompt_tokens"] == sum(len(sample.prompt_ids) for sample in samples)
    assert summary["length"]["max"] == max(lengths)
    assert sum(summary["finish"].values()) == 6
    assert summary["reward"] == 0.0
    assert summary["engine"] == "embedded"
    assert "transformers" in summary["server"]
    rows = read_rows(prompts, allowed=Allowed(prompts=True))
    for sample in samples:
        assert sample.status == "done"
        assert sample.conversation == rows[int(sample.group)]
        assert sample.prompt_ids == renderer(FAMILY).rollout(rows[int(sample.group)]).expanded
    pictures = sorted(file.read_bytes() for file in (out / "images").iterdir())
    assert pictures == sorted((tmp_path / "data" / f"{i}.png").read_bytes() for i in range(3))


# -- going on ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stub")
def test_a_file_cut_anywhere_is_gone_on_with(tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "data", 4), tmp_path / "out"
    roll(prompts, out)
    whole, unbroken = (out / "samples.jsonl").read_bytes(), responses(out)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    near_ends = {end + step for end in [0, *ends] for step in (-1, 0, 1)} & {*range(len(whole) + 1)}
    for cut in sorted(near_ends):
        (out / "samples.jsonl").write_bytes(whole[:cut])
        done = run._whole_groups(out / "samples.jsonl", 2)
        assert len(done) == whole[:cut].count(b"\n") // 2
        assert whole.startswith((out / "samples.jsonl").read_bytes())
    for cut in (0, 100, len(whole) // 2, len(whole) - 1):
        (out / "samples.jsonl").write_bytes(whole[:cut])
        summary = roll(prompts, out)
        assert responses(out) == unbroken
        assert summary["samples"] == 8


def test_a_command_that_is_killed_goes_on_without_loss_or_double(tmp_path: Path) -> None:
    """By kill -9; at the end everything is as in an unbroken run."""
    prompts, out = write_prompts(tmp_path / "data", 10), tmp_path / "out"
    words = ["rollout", "--model", tiny(FAMILY), "--prompts", str(prompts), "--out", str(out)]
    words += ["--n=2", "--max_new_tokens=16", "--engine_concurrency=2"]
    process = subprocess.Popen([sys.executable, "-m", "vireo", *words], env=environment(), cwd=ROOT)
    try:
        while process.poll() is None and _lines(out) < 6:
            time.sleep(0.01)
    finally:
        process.kill()
        code = process.wait()
    assert code == -signal.SIGKILL
    assert 6 <= _lines(out) < 20
    options: Any = {"model": tiny(FAMILY), "prompts": str(prompts)}
    options["engine"] = EngineSettings(engine_concurrency=2)
    options["sampling"] = SamplingSettings(n=2, max_new_tokens=16)
    assert run.rollout(out=str(out), **options)["samples"] == 20
    run.rollout(out=str(tmp_path / "unbroken"), **options)
    assert responses(out) == responses(tmp_path / "unbroken")


def _lines(out: Path) -> int:
    file = out / "samples.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_an_engine_that_dies_leaves_what_was_done(stub: StubEngine, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "data", 12), tmp_path / "out"
    options = {"engine": EngineSettings(engine_concurrency=2)}

    def fail(request: Any) -> None:
        if number(request) == 6:
            raise EngineGone("the server is dead")

    stub.fail = fail
    with pytest.raises(EngineGone, match="the server is dead"):
        roll(prompts, out, **options)
    assert stub.closed
    assert not (out / "summary.json").exists()
    before = responses(out)
    assert 0 < len(before) < 24
    stub.fail = lambda request: None
    stub.seen.clear()
    assert roll(prompts, out, **options)["samples"] == 24
    assert len(stub.seen) == 24 - len(before)
    after = responses(out)
    assert {key: after[key] for key in before} == before


def test_a_finished_folder_needs_no_engine_and_more_prompts_are_added(
    stub: StubEngine, tmp_path: Path
) -> None:
    prompts, out = write_prompts(tmp_path / "data", 5), tmp_path / "out"
    first = roll(prompts, out, limit=2)
    stub.seen.clear()
    assert roll(prompts, out, limit=2) == first
    assert roll(prompts, out, limit=1) == first
    assert stub.seen == []
    assert roll(prompts, out)["samples"] == 10
    assert len(stub.seen) == 6


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 3}, r"holds rollouts with n 2, not 3: choose another --out, or the same settings"),
        ({"reward": ["exact_match"]}, r"holds rollouts with reward \[\], not \['exact_match'\]"),
        ({"image_size": 28}, r"holds rollouts with image_size None, not 28"),
        ({"engine": EngineSettings(engine="vllm")}, r"with engine 'embedded', not 'vllm'"),
    ],
)
def test_a_folder_of_other_settings_is_left_alone(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "data", 2)
    roll(prompts, tmp_path / "out")
    before = (tmp_path / "out" / "samples.jsonl").read_bytes()
    with pytest.raises(InputError, match=message):
        roll(prompts, tmp_path / "out", **change)
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == before


@pytest.mark.usefixtures("stub")
def test_other_prompts_and_other_folders_are_refused(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "data", 2)
    roll(prompts, tmp_path / "out")
    write_prompts(tmp_path / "data", 3)
    with pytest.raises(InputError, match="holds rollouts with rows"):
        roll(prompts, tmp_path / "out")
    with pytest.raises(InputError, match="is not empty and holds no rollouts"):
        roll(prompts, tmp_path / "data")


@pytest.mark.usefixtures("stub")
def test_a_folder_in_which_nothing_was_generated_can_have_other_settings(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "data", 2)
    with pytest.raises(InputError, match="no model folder at"):
        run.rollout(
            model=str(tmp_path / "absent"),
            prompts=str(prompts),
            out=str(tmp_path / "out"),
            engine=EMBEDDED,
            sampling=SamplingSettings(),
        )
    assert roll(prompts, tmp_path / "out")["samples"] == 4


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_damaged_file_is_refused_and_not_cut(at: int, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "data", 2), tmp_path / "out"
    roll(prompts, out)
    lines = (out / "samples.jsonl").read_bytes().splitlines(keepends=True)
    damaged = [*lines[:at], b"nonsense\n", *lines[at + 1 :]]
    (out / "samples.jsonl").write_bytes(b"".join(damaged))
    with pytest.raises(InputError, match=f"line {at // 2 * 2 + 1} begins no group of 2 samples"):
        roll(prompts, out)
    assert (out / "samples.jsonl").read_bytes() == b"".join(damaged)


# -- prompts -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stub")
def test_rows_need_no_answer_and_an_answer_is_not_shown_to_the_model(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": t}) + "\n" for t in (turns[:1], turns)))
    roll(file, tmp_path / "out", n=1)
    one, other = sorted(dump.read(tmp_path / "out" / "samples.jsonl"), key=lambda s: s.group)
    assert one.prompt_ids == other.prompt_ids
    assert (one.answer, other.answer) == (None, "Me.")
    with pytest.raises(RowError, match="no assistant turn"):  # training still wants one
        read_rows(file, on_bad_row="skip")[0:1] and read_rows(_only_first(file))


def _only_first(file: Path) -> Path:
    short = file.with_name("short.jsonl")
    short.write_text(file.read_text().splitlines()[0])
    return short


def test_a_picture_of_an_answer_is_none_of_the_prompt() -> None:
    answer = row(user(0, "Draw it."), assistant(1, "There."), images=[noise(56, 56), noise(28, 28)])
    made = renderer(FAMILY).rollout(answer)
    assert [image.size for image in made.pictures] == [(56, 56)]
    assert len(made.pngs) == made.example.images == 1


@pytest.fixture(scope="module")
def web() -> Iterator[Any]:
    """A server with pictures; `web.asked` counts its paths."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            out = io.BytesIO()
            picture(int(self.path.strip("/").split(".")[0] or 0) % 100).save(out, "PNG")
            if self.path.startswith("/404"):
                return self.send_error(404)
            if self.path.startswith("/301"):
                self.send_response(301)
                self.send_header("Location", "file:///etc/passwd")
                return self.end_headers()
            self.send_response(200)
            self.end_headers()
            if self.path.startswith("/408"):  # for ever, byte by byte
                with contextlib.suppress(OSError):
                    while not stopped.wait(0.02):
                        self.wfile.write(b".")
            self.wfile.write(out.getvalue())

        def log_message(self, *_: Any) -> None:
            pass

    asked: list[str] = []
    stopped = threading.Event()
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.url = asked, f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    stopped.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_images_by_url_are_refused_unless_they_are_allowed(
    stub: StubEngine, web: Any, tmp_path: Path
) -> None:
    urls = [f"{web.url}/{i}.png" for i in range(3)]
    prompts = write_prompts(tmp_path / "data", 3, urls)
    web.asked.clear()
    with pytest.raises(RowError, match=r"row 0 .*nothing is fetched.*--allow_image_urls"):
        roll(prompts, tmp_path / "out")
    assert web.asked == []
    roll(prompts, tmp_path / "out", n=4, engine=EngineSettings(allow_image_urls=True))
    assert sorted(web.asked) == ["/0.png", "/1.png", "/2.png"]  # once a group
    web.asked.clear()
    for sample in dump.read(tmp_path / "out" / "samples.jsonl"):
        (ref,) = sample.conversation.images
        assert ref.value["path"] == urls[int(sample.group)]
        assert load_image(ref).tobytes() == picture(int(sample.group)).tobytes()
    assert web.asked == []  # they are in the dump now


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("404", "404"),
        ("301", "file:///etc/passwd|redirect"),
        ("408", "cannot be fetched: no end after 0.2 s"),
        ("7", "cannot be fetched: it has more than 100 bytes"),
    ],
)
def test_fetching_has_limits(
    path: str, message: str, web: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "408":
        monkeypatch.setattr(references, "_FETCH_S", 0.2)
    if path == "7":
        monkeypatch.setattr(references, "_MOST_FETCHED", 100)
    with pytest.raises(references.ImageError, match=message) as caught:
        references.fetched(ImageRef(f"{web.url}/{path}"))
    assert caught.value.reason == "unreadable"


@pytest.mark.parametrize("value", ["a.png", "file:///a.png", "data:image/png;base64,AA", b"x"])
def test_what_is_no_url_is_not_fetched(value: Any) -> None:
    ref = ImageRef(value, "/data")
    assert references.fetched(ref) is ref


@pytest.mark.usefixtures("stub")
def test_images_stay_inside_the_data_folder_unless_that_is_allowed(tmp_path: Path) -> None:
    picture(9).save(tmp_path / "outside.png")
    images = ["0.png", "../outside.png", str(tmp_path / "outside.png"), {"path": "3.png"}]
    prompts = write_prompts(tmp_path / "data", 4, images)
    with pytest.raises(RowError, match=r"row 1 .*outside_root"):
        roll(prompts, tmp_path / "out")
    roll(prompts, tmp_path / "out", engine=EngineSettings(allow_image_paths=True))
    shown = {
        int(sample.group): load_image(sample.conversation.images[0]).tobytes()
        for sample in dump.read(tmp_path / "out" / "samples.jsonl")
    }
    expected = [picture(0), picture(9), picture(9), picture(3)]
    assert shown == {i: image.tobytes() for i, image in enumerate(expected)}


# -- flags ---------------------------------------------------------------------------------------

NEEDED = ["--model", "m", "--prompts", "p", "--out", "o"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--n", "0"], "--n: found '0', expected whole number >= 1"),
        (["--temperature=hot"], "--temperature: found 'hot', expected number >= 0"),
        (["--engine", "tgi"], "--engine: found 'tgi', expected embedded|sglang|vllm"),
        (["--engine_timout", "3"], "unknown flag --engine_timout; did you mean --engine_timeout?"),
        (["--vllm-x", "3"], "--vllm-x is for another engine than embedded"),
        (["--engine=vllm", "--sglang_y=3"], "--sglang-y is for another engine than vllm"),
        (["--reward", "nice"], "unknown reward 'nice'"),
        ([], "data file 'p' is not found"),
    ],
)
def test_a_wrong_flag_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    needed = NEEDED
    if "--reward" in words:
        needed = ["--model", "m", "--out", "o", "--prompts", str(write_prompts(tmp_path, 1))]
    assert cli.main(["rollout", *needed, *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_flags_of_the_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(run, "rollout", lambda **given: seen.update(given) or {})
    words = ["--engine=sglang", "--sglang-mem-fraction-static", "0.5", "--sglang_enable-x"]
    words += ["--allow-image-urls", "--engine_retries=0", "--n", "4", "--top_k=5"]
    assert cli.main(["rollout", *NEEDED, *words, "--reward=exact_match,a:b"]) == 0
    assert seen["engine"] == EngineSettings(
        engine="sglang",
        allow_image_urls=True,
        engine_retries=0,
        server_args={"sglang-mem-fraction-static": "0.5", "sglang-enable-x": ""},
    )
    assert seen["sampling"] == SamplingSettings(n=4, top_k=5)
    assert seen["reward"] == ["exact_match", "a:b"]
