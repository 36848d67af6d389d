"""The ladder and the attribution: an honest engine passes, and every planted fault is named."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pil
from safetensors.torch import save_file

from tests.ranks.mismatch import pairs
from tests.rows import picture
from tests.serving import serving
from tests.tiny_models import FAMILIES, noise, policy, row, tiny, user
from tests.tiny_models import renderer as tiny_renderer
from tests.trained import prompts, trained
from vireo import cli
from vireo.data.conversation import Conversation
from vireo.data.prompt import Prompt
from vireo.data.ragged import TRAINER_KEYS, Batch
from vireo.data.received import received
from vireo.data.render import Renderer
from vireo.data.response import with_response
from vireo.models.build import whole_model
from vireo.models.policy import Policy
from vireo.rl import compare
from vireo.rl.attribution import MAX_ABS, MULT, Tried, attribute, explain, scored
from vireo.rl.ladder import Report, climb, never_seen
from vireo.rl.mismatch_page import as_json, as_page, as_text
from vireo.rl.swaps import Trainer
from vireo.rollout.embedded import EmbeddedEngine
from vireo.rollout.http import Http
from vireo.rollout.sample import Generation, Request, Sampling
from vireo.rollout.sglang import SglangEngine
from vireo.weights.receive import Receiver
from vireo.weights.source import Folder

SAMPLING = Sampling(12, temperature=1.3, seed=1)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@cache
def renderer() -> Renderer:
    return Renderer(trained()[1])


@cache
def trainer(dtype: torch.dtype = FLOAT32) -> Trainer:
    old, new = trained()
    made = renderer()
    hf = whole_model(made.config, made.family, new, dtype)
    other = dict(whole_model(made.config, made.family, old).named_parameters())
    return Trainer(Policy(hf, made.family, made.dummy()).eval(), made, other=other)


class Engine(EmbeddedEngine):
    """An engine with a fault in what it makes of prompts or of answers; `shows`: it can be looked
    into, otherwise it shows the ids of prompts, as a server does, and nothing else."""

    shows = True
    seen: Callable[[Prompt], Prompt] = staticmethod(lambda prompt: prompt)
    asked: Callable[[Sampling], Sampling] = staticmethod(lambda sampling: sampling)

    def changed(self, request: Request) -> Request:
        seen, sampling = self.seen(request.prompt), self.asked(request.sampling)
        return replace(request, prompt=seen, sampling=sampling)

    async def generate(self, request: Request) -> Generation:
        return await super().generate(self.changed(request))

    async def look(self, request: Request) -> dict[str, Any]:
        return await super().look(self.changed(request)) if self.shows else {}

    async def checksums(self) -> dict[str, str]:
        return await super().checksums() if self.shows else {}


def engine(shows: bool = True, folder: int = 1, dtype: torch.dtype = FLOAT32, **faults) -> Engine:
    made = Engine.of_folder(trained()[folder], renderer(), dtype)
    made.shows = shows
    for name, fault in faults.items():
        setattr(made, name, fault)
    return made


def climbed(
    made: EmbeddedEngine,
    sampling: Sampling = SAMPLING,
    dtype: torch.dtype = FLOAT32,
    update: str | None = None,
    rows: list[Conversation] | None = None,
) -> Report:
    async def send() -> None:
        await made.pause()
        await made.update_weights(Folder(update or ""), "new")
        await made.resume()

    async def run() -> Report:
        async with made:
            return await climb(made, trainer(dtype), rows or prompts(), sampling, update and send)

    return asyncio.run(run())


def states(report: Report) -> dict[str, str]:
    return {rung.name: rung.state for rung in report.rungs}


def where(report: Report) -> tuple[str, str]:
    """The rung that differs, and what it found."""
    rung = next(rung for rung in report.rungs if rung.state == "differs")
    after = report.rungs[report.rungs.index(rung) + 1 :]
    assert all(one.state == "not reached" for one in after)
    return rung.name, rung.found


def is_loud(report: Report) -> bool:
    """At least 20 times over both limits."""
    return report.base.gap["max_abs"] >= 20 * MAX_ABS and report.base.mult >= 20 * MULT


# -- honest engines --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_an_honest_engine_passes_every_rung(dtype: torch.dtype) -> None:
    report = climbed(engine(dtype=dtype), dtype=dtype)
    assert states(report) == {
        "ids and response": "equal",
        "pixels": "equal",
        "other keys": "equal",
        "positions": "equal",
        "weights": "equal",
        "repeated image": "says nothing",
        "embeddings": "equal",
        "log-probs": "equal",
    }
    assert report.agrees
    assert report.causes == ["noise floor"]
    assert report.says.startswith("explained by the noise floor")
    if dtype == FLOAT32:
        assert report.base.gap["max_abs"] <= MAX_ABS
        assert report.base.mult <= MULT


def test_what_an_engine_does_not_show_is_unseen_and_never_passed() -> None:
    report = climbed(engine(shows=False))
    unseen = {name for name, state in states(report).items() if state == "unseen"}
    assert unseen == {"pixels", "other keys", "positions", "weights", "embeddings"}
    assert report.agrees
    assert report.causes == ["noise floor"]


def test_an_engine_that_got_new_weights_and_forgot_old_pictures_passes() -> None:
    report = climbed(engine(folder=0), update=trained()[1])
    assert states(report)["repeated image"] == "equal"
    assert "version new" in next(r.found for r in report.rungs if r.name == "weights")
    assert report.agrees


def test_weights_that_change_nothing_say_nothing_about_old_pictures() -> None:
    report = climbed(engine(), update=trained()[1])
    rung = next(rung for rung in report.rungs if rung.name == "repeated image")
    assert rung.state == "says nothing"
    assert "changed nothing" in rung.found


def test_checksums_by_names_of_the_engines_own_are_no_difference() -> None:
    class Stock(Engine):
        async def checksums(self) -> dict[str, str]:
            return {f"rank0/{name}": value for name, value in (await super().checksums()).items()}

    report = climbed(Stock.of_folder(trained()[1], renderer(), FLOAT32))
    assert states(report)["weights"] == "unseen"
    assert report.agrees


def test_other_number_formats_of_the_same_weights_have_the_same_checksums() -> None:
    report = climbed(engine(dtype=BFLOAT16))
    assert states(report)["weights"] == "equal"
    assert "number format" in report.causes


# -- planted faults --------------------------------------------------------------------------------


def shown(pictures: Callable[[Prompt], list[Pil.Image]]) -> Callable[[Prompt], Prompt]:
    def seen(prompt: Prompt) -> Prompt:
        if not prompt.pictures:
            return prompt
        return replace(received(renderer(), pictures(prompt), ids=prompt.ids), row=prompt.row)

    return staticmethod(seen)  # type: ignore[return-value]


def without(*names: str) -> Callable[[Prompt], Prompt]:
    def seen(prompt: Prompt) -> Prompt:
        fields = {n: v for n, v in prompt.example.fields.items() if n not in names}
        return replace(prompt, example=replace(prompt.example, fields=fields))

    return staticmethod(seen)  # type: ignore[return-value]


def flat(prompt: Prompt) -> Prompt:
    fields = prompt.example.fields
    positions = torch.arange(len(prompt.example)).expand_as(fields["positions"])
    example = replace(prompt.example, fields=fields | {"positions": positions})
    return replace(prompt, example=example)


def as_stored(prompt: Prompt) -> list[Pil.Image]:
    return [
        Pil.open(io.BytesIO(ref.value)).convert("RGB").resize(size)
        for ref, picture in zip(prompt.row.images, prompt.pictures)
        for size in [picture.size[:: _side(ref.value)]]
    ]


def _side(png: bytes) -> int:
    """-1 where the picture lies on its side."""
    return -1 if Pil.open(io.BytesIO(png)).getexif().get(0x0112) == 6 else 1


def blurred(prompt: Prompt) -> list[Pil.Image]:
    halves = [
        picture.resize((picture.width // 2, picture.height // 2)) for picture in prompt.pictures
    ]
    return [half.resize(picture.size) for half, picture in zip(halves, prompt.pictures)]


def mirrored(prompt: Prompt) -> list[Pil.Image]:
    return [picture.transpose(Pil.Transpose.FLIP_LEFT_RIGHT) for picture in prompt.pictures]


def gray(prompt: Prompt) -> list[Pil.Image]:
    return [Pil.new("RGB", picture.size, (128, 128, 128)) for picture in prompt.pictures]


FAULTS = {
    "image flipped": ("pixels", {"seen": shown(mirrored)}),
    "EXIF ignored": ("pixels", {"seen": shown(as_stored)}),
    "half size": ("pixels", {"seen": shown(blurred)}),
    "blank image": ("pixels", {"seen": shown(gray)}),
    "1-D positions": ("positions", {"seen": staticmethod(flat)}),
    "without pixel_values": ("embeddings", {"seen": without("pixel_values")}),
    "other weights": ("weights", {"folder": 0}),
    "temperature 1": (
        "log-probs",
        {"asked": staticmethod(lambda sampling: replace(sampling, temperature=1.0))},
    ),
}


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_loud_and_named(name: str, shows: bool) -> None:
    """By the rung where it is, if the engine shows it, and by attribution alone if it shows only
    ids."""
    rung, faults = FAULTS[name]
    report = climbed(engine(shows, **faults))
    assert is_loud(report)
    assert not report.agrees
    assert where(report)[0] == (rung if shows else "log-probs")
    assert report.causes == [name], report.says
    assert name in report.says


class Keeps(Engine):
    """An engine that keeps the embeddings of every picture, by its pixels, whatever its weights."""

    def remember(self) -> Keeps:
        model, kept = self.policy.hf.model, {}
        look = model.get_image_features

        def remembered(pixel_values, image_grid_thw, **options):
            parts = []
            sizes = image_grid_thw.prod(-1).tolist()
            for pixels, grid in zip(pixel_values.split(sizes), image_grid_thw):
                key = pixels.numpy().tobytes()
                if key not in kept:
                    kept[key] = look(pixels, image_grid_thw=grid[None], **options)
                parts.append(kept[key])
            features = tuple(part for out in parts for part in out.pooler_output)
            return type(parts[0])(pooler_output=features)

        model.get_image_features = remembered
        return self


@pytest.mark.parametrize("shows", [True, False])
def test_embeddings_of_old_weights_are_named(shows: bool) -> None:
    """By the rung of the repeated image, also by an engine that shows ids alone."""
    made = Keeps.of_folder(trained()[0], renderer(), FLOAT32).remember()
    made.shows = shows
    report = climbed(made, update=trained()[1])
    assert is_loud(report)
    name, found = where(report)
    assert name == "repeated image"
    assert "keeps embeddings of old weights" in found
    assert report.causes == ["old embeddings"], report.says
    assert "parts at repeated image" in report.verdict


def test_an_engine_that_resizes_to_fewer_tokens_is_named_by_its_ids() -> None:
    def smaller(prompt: Prompt) -> list[Pil.Image]:
        return [p.resize((p.width // 2, p.height // 2)) for p in prompt.pictures]

    report = climbed(engine(False, seen=shown(smaller)))
    name, found = where(report)
    assert name == "ids and response"
    assert found.startswith("row 1000: the engine saw another prompt")


def test_a_response_that_breaks_the_contract_is_named() -> None:
    class Wild(Engine):
        async def generate(self, request: Request) -> Generation:
            got = await super().generate(request)
            return replace(got, ids=[*got.ids[:-1], renderer().banned_ids[0]])

    report = climbed(Wild.of_folder(trained()[1], renderer(), FLOAT32))
    assert where(report)[0] == "ids and response"
    assert "only a processor may write" in where(report)[1]


@pytest.mark.parametrize(("said", "state"), [(None, "unseen"), ([], "differs")])
def test_an_engine_must_say_which_ids_it_saw(said: list[int] | None, state: str) -> None:
    class Silent(Engine):
        async def generate(self, request: Request) -> Generation:
            return replace(await super().generate(request), prompt_ids=said)

    report = climbed(Silent.of_folder(trained()[1], renderer(), FLOAT32))
    assert states(report)["ids and response"] == state


def test_a_picture_is_made_new_also_where_the_resize_swallows_a_grey_level() -> None:
    made = tiny_renderer("llava")
    prompt = made.rollout(row(user(0, "What?"), images=[noise(300, 300)]))
    fresh = never_seen(Trainer(policy("llava"), made), prompt)
    assert not fresh.example.fields["pixel_values"].equal(prompt.example.fields["pixel_values"])
    assert fresh.expanded == prompt.expanded
    one = np.asarray(prompt.pictures[0]).astype(int) - np.asarray(fresh.pictures[0])
    assert (one != 0).sum() == 1
    assert abs(one).max() > 1


def test_a_changed_projector_is_named_by_embeddings_where_weights_are_not_shown() -> None:
    made = engine()
    made.checksums = Engine.checksums.__get__(engine(False))  # type: ignore[method-assign]
    with torch.no_grad():
        made.policy.hf.model.visual.merger.mlp[2].weight.mul_(1.5)
    report = climbed(made)
    name, found = where(report)
    assert name == "embeddings"
    assert found.startswith("row 1000: ")
    assert "in the engine" in found
    assert report.causes == []
    assert report.says.startswith("no single swap explains it")


class Answers(Engine):
    """An engine that says other log-probs of the same tokens."""

    def says(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        raise NotImplementedError

    async def generate(self, request: Request) -> Generation:
        got = await super().generate(request)
        example = with_response(request.prompt.example, got.ids, renderer().positions)
        inputs = Batch.of([example]).pad(renderer().pad_id)
        given = {n: v for n, v in inputs.items() if n not in TRAINER_KEYS}
        given["position_ids"] = inputs["positions"][1:]
        with torch.no_grad():
            logits = trainer().policy.hf(**given, use_cache=False).logits[0].double()
        logits = self.says(logits[-len(got.ids) - 1 : -1], request.sampling)
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(got.ids)[:, None])
        return replace(got, logprobs=chosen[:, 0].tolist())


class Renormalised(Answers):
    """Of the tokens that top-p and top-k leave, by hand."""

    def says(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        logits = logits.clone()
        logits[:, list(renderer().banned_ids)] = -torch.inf
        for one in logits:
            p = (one / sampling.temperature).softmax(-1)
            kept, total = [], 0.0
            for token in p.argsort(descending=True).tolist()[: sampling.top_k or None]:
                if total < sampling.top_p:
                    kept.append(token)
                total += float(p[token])
            gone = torch.ones(len(one), dtype=torch.bool)
            gone[kept] = False
            one[gone] = -torch.inf
        return logits / sampling.temperature


class Unbanned(Answers):
    def says(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        return logits / sampling.temperature


class Raw(Answers):
    def says(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        return logits


@pytest.mark.parametrize(
    ("kind", "sampling", "name"),
    [
        (Renormalised, Sampling(12, 1.3, top_p=0.7, seed=1), "renormalised"),
        (Renormalised, Sampling(12, 1.5, top_p=0.9, top_k=8, seed=1), "renormalised"),
        (Unbanned, SAMPLING, "no ban mask"),
        (Raw, SAMPLING, "raw logits"),
    ],
)
def test_log_probs_of_another_distribution_are_named(kind, sampling, name: str) -> None:
    report = climbed(kind.of_folder(trained()[1], renderer(), FLOAT32), sampling)
    assert where(report)[0] == "log-probs"
    assert report.causes == [name], report.says


@pytest.mark.parametrize(
    ("name", "resample"),
    [("resize library", Pil.Resampling.BICUBIC), ("resize filter", Pil.Resampling.BILINEAR)],
)
def test_another_resize_is_named(name: str, resample: Pil.Resampling) -> None:
    """Of a picture that has an edge everywhere: flat ones look alike, however they are resized."""
    question = row(user(0, "Where is it?"), images=[noise(100, 66)], where="noise")

    def resized(prompt: Prompt) -> list[Pil.Image]:
        given = renderer().pictures(prompt.row)
        return [g.resize(p.size, resample) for g, p in zip(given, prompt.pictures)]

    report = climbed(engine(False, seen=shown(resized)), rows=[question])
    assert report.base.gap["max_abs"] > MAX_ABS
    assert report.causes == [name], report.says


def test_a_server_is_climbed_over_http() -> None:
    """`vireo serve` shows ids and checksums: old weights are named by these."""

    async def run() -> Report:
        old = EmbeddedEngine.of_folder(trained()[0], renderer(), FLOAT32)
        receiver = Receiver(old.policy.hf, old.policy.family)
        async with old, serving(old, renderer(), receiver) as url:
            client = SglangEngine(Http(url), renderer())
            async with client:
                return await climb(client, trainer(), prompts(), SAMPLING)

    report = asyncio.run(run())
    assert is_loud(report)
    assert where(report)[0] == "weights"
    assert "in the engine" in where(report)[1]
    assert report.causes == ["other weights"]


# -- what is concluded -----------------------------------------------------------------------------


def tried(name: str, mult: float, floor: float = 0.0) -> Tried:
    figures = [
        {"token_mult_prob_error": 1 + value, "max_abs": 4 * value} for value in (mult, floor)
    ]
    return Tried(name, "it differs", *figures, 1)


@pytest.mark.parametrize(
    ("base", "swaps", "causes", "says"),
    [
        (1e-5, {"a": 1e-6}, ["noise floor"], "explained by the noise floor"),
        (1e-1, {"a": 1e-6, "b": 1e-2}, ["a"], "explained by a: it differs"),
        (1e-1, {"a": 1e-6, "b": 2e-6, "c": 1e-2}, ["a", "b"], "several swaps explain it"),
        (1e-1, {"a": 2e-3, "b": 5e-2}, ["a"], "explained for the most part by a"),
        (1e-1, {"a": 2e-2, "b": 1e-1}, [], "no single swap explains it; the nearest is a"),
        (1e-1, {}, [], "no single swap explains it"),
    ],
)
def test_the_conclusion_is_what_the_figures_say(base, swaps, causes, says) -> None:
    found = explain(tried("base", base), [tried(name, mult) for name, mult in swaps.items()])
    assert found[1] == causes
    assert found[0].startswith(says)


def test_a_gap_is_noise_up_to_three_times_the_floor() -> None:
    assert tried("", 0.08, floor=0.03).is_noise
    assert not tried("", 0.1, floor=0.03).is_noise
    assert tried("", 1e-5).is_noise
    assert not tried("", 3e-5).is_noise
    only_one_token = replace(tried("", 1e-5), gap={"token_mult_prob_error": 1, "max_abs": 0.2})
    assert not only_one_token.is_noise
    unknown = replace(tried("", 0), gap={"token_mult_prob_error": float("nan"), "max_abs": 0.0})
    assert not unknown.is_noise


def test_two_runs_in_another_number_format_explain_a_gap_as_large_as_their_noise() -> None:
    """A bf16 engine beside an fp32 trainer: in bf16 the trainer is as far from it as before."""
    found = explain(tried("base", 0.025), [tried("number format", 0.03, 0.03), tried("a", 0.024)])
    assert found[1] == ["number format"]


# -- what a person gets ----------------------------------------------------------------------------


def test_the_page_and_the_text_say_the_same() -> None:
    """Whatever a row holds is escaped, and JSON has no infinity."""
    report = climbed(engine(seen=shown(mirrored)))
    report.rungs[1] = replace(report.rungs[1], found="<script>alert(1)</script>\x1b[31m")
    report.base.gap["seq_ratio_error"] = float("inf")
    text, page = as_text(report), as_page(report)
    assert "\x1b" not in text + page
    assert "<script" not in page
    for words in ("parts at pixels", "explained by image flipped", "token_mult_prob_error"):
        assert words in text
        assert words in page
    assert page.count("<circle") == len(report.tokens) == report_tokens(report)
    for name in ("half size", "number format"):
        assert name in text
        assert f"<td>{name}</td>" in page
    found = json.loads(as_json(report))
    assert found["base"]["gap"]["seq_ratio_error"] is None
    assert found["causes"] == ["image flipped"]
    assert found["agrees"] is False
    assert found["rungs"][0]["state"] == "equal"


def report_tokens(report: Report) -> int:
    kinds = [kind for kind, *_ in report.tokens]
    return sum(kinds.count(kind) for kind in ("text", "image_first", "image_later"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three rows with pictures, one without."""
    rows = []
    for k in range(4):
        images = [] if k == 3 else [f"{k}.png"]
        for name in images:
            picture(k).save(tmp_path / name)
        asked = {"from": "human", "value": "<image>" * len(images) + "Where is it?"}
        rows.append({"id": k, "image": images, "conversations": [asked]})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return tmp_path / "rows.json"


def command(data: Path, *more: str) -> int:
    return cli.main(["mismatch", "--model", trained()[1], "--data", str(data), *more])


def test_the_command_reports_and_says_by_its_exit_code_whether_both_agree(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert command(data, "--out", str(out), "--limit", "3", "--max_new_tokens", "5") == 0
    assert "nothing differs; explained by the noise floor" in capsys.readouterr().out
    report = json.loads((out / "mismatch.json").read_text())
    assert 0 < len(report["tokens"]) <= 3 * 5
    assert "Mismatch of engine and trainer" in (out / "mismatch.html").read_text()
    faulty = engine(False, seen=shown(mirrored))
    monkeypatch.setattr(compare, "open_engine", lambda *given, **options: faulty)
    assert command(data) == 1
    assert "parts at log-probs; explained by image flipped" in capsys.readouterr().out


def test_the_command_sends_new_weights_to_an_engine_that_had_others(
    data: Path, capsys: pytest.CaptureFixture
) -> None:
    assert command(data, "--other_model", trained()[0], "--update") == 0
    assert re.search(r"repeated image +equal", capsys.readouterr().out)


def test_the_command_takes_the_number_format(data: Path, capsys: pytest.CaptureFixture) -> None:
    assert command(data, "--dtype", "bf16", "--limit", "2") == 0
    floor = re.search(r"trainer's own (\S+)$", capsys.readouterr().out.strip())
    assert floor
    assert float(floor[1]) > 1e-4


def test_the_command_refuses_what_cannot_be_compared(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert command(data, "--other_model", tiny("llava")) == 2
    (tmp_path / "none.json").write_text("[]")
    assert command(tmp_path / "none.json") == 2
    (tmp_path / "adapter").mkdir()
    base = {"base_model_name_or_path": trained()[1], "peft_type": "LORA"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(base))
    save_file({"empty": torch.zeros(1)}, tmp_path / "adapter" / "adapter_model.safetensors")
    arguments = ["--model", str(tmp_path / "adapter"), "--data", str(data)]
    assert cli.main(["mismatch", *arguments]) == 2
    assert "--merge_lora" in capsys.readouterr().err


# -- every family ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_an_honest_engine_of_every_family_passes(family: str) -> None:
    """And swaps leave the model as it was."""
    made, model = tiny_renderer(family), policy(family)
    if not made.family.can_mix:
        model = Policy(model.hf, made.family, None).eval()
    vision = made.family.has_vision
    rows = [
        row(user(*range(n), f"Number {n}?"), images=[noise(56, 56, k) for k in range(n)])
        for n in ((0, 1, 2) if vision else (0, 0))
    ]
    own = EmbeddedEngine.of_folder(tiny(family), made, FLOAT32)
    subject = Trainer(model, made)

    async def run() -> Report:
        async with own:
            return await climb(own, subject, rows, SAMPLING)

    report = asyncio.run(run())
    assert report.agrees, report.rungs
    assert not vision or states(report)["embeddings"] == "equal"
    assert "unseen" not in states(report).values()
    some = pairs(made)
    before = scored(subject, [subject.row(pair) for pair in some])
    names = {one.name for one in attribute(subject, some, report.base.floor)}
    assert {"eager attention", "sdpa attention", "number format", "temperature 1"} <= names
    assert ({"image flipped", "blank image"} <= names) == vision
    assert ("1-D positions" in names) == (made.family.positions == "mrope")
    after = scored(subject, [subject.row(pair) for pair in some])
    assert all(one.equal(other) for one, other in zip(before, after))
