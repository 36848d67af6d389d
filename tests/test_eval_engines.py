"""`vireo eval` by any engine: the same answers, several a row, any reward as the measure."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import write_rows
from tests.serving import serving
from tests.stub_engine import StubEngine
from tests.tiny_models import FAMILIES, renderer, tiny
from vireo import cli, evaluation
from vireo.data.conversation import read_rows
from vireo.errors import InputError
from vireo.evaluation import answer_rows, evaluate_files, pass_at
from vireo.rollout import run
from vireo.rollout.embedded import EmbeddedEngine
from vireo.rollout.sample import Sample
from vireo.settings.rollout import EngineSettings, SamplingSettings

FAMILY = "qwen2_5_vl"
SHORT = SamplingSettings(max_new_tokens=4, temperature=0)


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


# mllama mixes no numbers of images, gemma3 has masks of its own, qwen3 no eyes.
@pytest.mark.parametrize("family", ["qwen2_5_vl", "mllama", "gemma3", "qwen3"])
def test_greedy_answers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    counts = [1, 0, 1, 2, 0] if FAMILIES[family].has_vision else [0] * 5
    file = write_rows(tmp_path, counts, ((56, 56), (84, 56)))
    result = evaluate_files(
        model=tiny(family), eval_file=str(file), sampling=SHORT, output_dir=str(tmp_path / "out")
    )
    auto = getattr(transformers, FAMILIES[family].auto_class)
    hf = auto.from_pretrained(tiny(family), dtype="auto").eval()
    rows = list(read_rows(file))
    cpu = torch.device("cpu")
    expected = answer_rows(hf.generate, renderer(family), rows, cpu, max_new_tokens=4)
    found = answers(tmp_path / "out")
    assert [{k: v for k, v in a.items() if k != "images"} for a in found] == expected
    assert [len(a["images"]) for a in found] == counts
    assert list(result) == ["accuracy", "rows", "seconds", "answers"]
    assert (result["accuracy"], result["rows"]) == (evaluation.accuracy(expected), 5)


@contextmanager
def served(family: str) -> Iterator[str]:
    """The URL of `vireo serve` over the family's tiny model, in a thread."""
    ready, done, url = threading.Event(), threading.Event(), list[str]()

    async def serve() -> None:
        engine = EmbeddedEngine.of_folder(tiny(family), renderer(family))
        async with serving(engine, renderer(family)) as where:
            url.append(where)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        while not ready.wait(0.1):
            assert thread.is_alive()
        yield url[0]
    finally:
        done.set()
        thread.join()


def test_answers_over_http_are_those_of_this_process(tmp_path: Path) -> None:
    file = write_rows(tmp_path, [1, 0, 2], ((56, 56), (84, 56)))
    options: dict[str, Any] = {"model": tiny(FAMILY), "eval_file": str(file)}
    options["sampling"] = SamplingSettings(n=3, max_new_tokens=4, seed=5)
    evaluate_files(**options, output_dir=str(tmp_path / "here"))
    with served(FAMILY) as url:
        engine = EngineSettings(engine="sglang", sglang_url=[url])
        evaluate_files(**options, engine=engine, output_dir=str(tmp_path / "there"))
    found = answers(tmp_path / "here")
    assert answers(tmp_path / "there") == found
    assert any(len(set(answer["answers"])) > 1 for answer in found)


# -- several answers, any measure ----------------------------------------------------------------


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    engine = StubEngine()
    monkeypatch.setattr(run, "open_engine", lambda *_, **__: engine)
    return engine


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3))
def test_pass_at_k_is_the_share_of_all_choices_in_which_one_passes(rows: list[list[bool]]) -> None:
    for k in range(1, 6):
        shares = [
            sum(map(any, combinations(row, k))) / len(list(combinations(row, k))) for row in rows
        ]
        assert pass_at(k, rows) == pytest.approx(sum(shares) / len(shares))


def test_pass_at_k_by_hand() -> None:
    assert pass_at(1, [[True, False, False, False]]) == 0.25
    assert pass_at(2, [[True, False, False, False]]) == 0.5
    assert pass_at(2, [[True, True, False, False], [False] * 4]) == pytest.approx((1 - 1 / 6) / 2)


def by_length(sample: Sample) -> float:
    """Right for the even samples of even rows, half right elsewhere."""
    row = int(sample.conversation.id.strip("r"))
    return 1.5 if row % 2 == 0 and sample.index % 2 == 0 else 0.5


@pytest.mark.usefixtures("stub")
def test_any_reward_is_a_measure_of_several_answers(tmp_path: Path) -> None:
    file = write_rows(tmp_path, [0] * 4)
    result = evaluate_files(
        model=tiny(FAMILY),
        eval_file=str(file),
        sampling=SamplingSettings(n=6, max_new_tokens=8),
        reward="tests.test_eval_engines:by_length",
        output_dir=str(tmp_path / "out"),
    )
    del result["seconds"], result["answers"]
    assert result == {
        "accuracy": 0.25,
        "rows": 4,
        "reward": 0.75,
        "pass@1": 0.25,
        "pass@2": pytest.approx((1 - 3 / 15) / 2),
        "pass@4": 0.5,
        "pass@6": 0.5,
    }
    found = answers(tmp_path / "out")
    assert [answer["row"][:15] for answer in found] == [f"rows.json row {i}" for i in range(4)]
    assert found[0]["correct"] == [True, False] * 3
    assert found[1]["reward"] == [0.5] * 6
    assert len(set(found[0]["answers"])) == 6


@pytest.mark.usefixtures("stub")
def test_rows_without_an_answer_are_left_out_only_where_one_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    lines = [json.dumps({"id": f"r{i}", "messages": t}) for i, t in enumerate((turns[:1], turns))]
    file.write_text("\n".join(lines))
    options: dict[str, Any] = {"model": tiny(FAMILY), "eval_file": str(file)}
    assert evaluate_files(**options)["rows"] == 1
    assert evaluate_files(**options, reward="tests.test_eval_engines:by_length")["rows"] == 2


def test_a_row_is_asked_up_to_its_last_answer(stub: StubEngine, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    said = ["One?", "1", "Two?", "2", "Three?"]
    turns = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(said)]
    file.write_text(json.dumps({"messages": turns}))
    evaluate_files(model=tiny(FAMILY), eval_file=str(file), output_dir=str(tmp_path / "out"))
    (answer,) = answers(tmp_path / "out")
    assert (answer["prompt"], answer["expected"]) == ("Two?", "2")
    prompt = renderer(FAMILY).prompt(read_rows(file)[0])[0]
    assert stub.seen[0].prompt.expanded == prompt.fields["input_ids"].tolist()


@pytest.mark.usefixtures("stub")
def test_several_greedy_answers_are_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path, [0])
    with pytest.raises(InputError, match="--n 2 greedy answers are all the same"):
        evaluate_files(
            model=tiny(FAMILY), eval_file=str(file), sampling=SamplingSettings(n=2, temperature=0)
        )


def test_adapters_alone_are_not_for_a_server(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    engine = EngineSettings(engine="sglang", sglang_url=["http://127.0.0.1:9"])
    with pytest.raises(InputError, match=r"holds adapters alone, .* --engine embedded, or export"):
        evaluate_files(model=str(tmp_path), eval_file=str(write_rows(tmp_path, [0])), engine=engine)


def test_the_command_is_greedy_and_short_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(evaluation, "evaluate_files", lambda **given: seen.update(given) or {})
    words = ["eval", "--model", "m", "--eval_file", "f", "--batch_size=4"]
    assert cli.main(words) == 0
    assert seen["sampling"] == evaluation.GREEDY
    assert seen["engine"] == EngineSettings()
    assert cli.main([*words, "--n=8", "--temperature=0.7", "--engine=vllm"]) == 0
    assert seen["sampling"] == SamplingSettings(n=8, temperature=0.7, max_new_tokens=64)
    assert seen["engine"] == EngineSettings(engine="vllm")
