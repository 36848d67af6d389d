"""The parity grid: it passes on every family, and a planted fault fails just what it should."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import minicpmv_stand_in
from tests.launch import ROOT
from tests.rows import write_rows
from tests.tiny_models import scratch, tiny
from vireo import cli
from vireo.checks import matrix
from vireo.checks import saved as saved_check
from vireo.checks.grid import check_family, run_grid
from vireo.checks.joined import packed_is_alone, padded_is_alone
from vireo.checks.report import Finding, Report, Result, listed
from vireo.checks.starter import UnknownFamily, starting_entry
from vireo.checks.subject import Subject, open_subject
from vireo.data.conversation import Conversation
from vireo.data.ragged import Batch, Example
from vireo.errors import InputError
from vireo.families import FAMILIES, Family, Key
from vireo.models import policy as policy_module
from vireo.models.attention import packed_rows
from vireo.models.load import fill_from_checkpoint

QUICK = ("qwen2_5_vl", "llama", "mllama", "minicpmv4_6")
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
LABELS = {
    *("labels over turns", "labels with a system turn"),
    *("labels with images", "labels with tools"),
}


def found(report: Report) -> dict[str, Result]:
    return {result.name: result for result in report.results}


def failures(report: Report) -> dict[str, str]:
    return {result.name: result.why for result in report.results if result.status == "fail"}


# Nothing is wrong


@pytest.mark.parametrize("name", EVERY)
def test_the_grid_passes_on_every_family(name: str) -> None:
    remote = FAMILIES[name].remote
    model = str(minicpmv_stand_in.build(scratch() / name)) if remote else tiny(name)
    report = check_family(model, trust_remote_code=remote)
    assert failures(report) == {}
    results = found(report)
    closest = ["alone = padded"] + ["alone = packed"] * FAMILIES[name].can_pack
    closest += [] if remote else ["loss = the family's own"]
    for close in closest:
        assert results[close].status == "pass"
        assert (results[close].figure or 0.0) <= 1e-5
    if FAMILIES[name].has_vision:
        assert results["pixels matter"].status == "pass"
        assert {f"{key} matters" for key in FAMILIES[name].keys} <= set(results)
    if FAMILIES[name].positions == "mrope":
        assert results["positions matter"].limit == 1e-3


def test_what_has_no_meaning_for_a_family_says_why() -> None:
    nothing = {
        n: r.why for n, r in found(check_family(tiny("llama"))).items() if r.status == "cannot"
    }
    assert set(nothing) == {
        *("labels with images", "keys are known", "joined as the processor joins"),
        *("positions matter", "pixels matter", "order of images matters"),
        *("same-size images differ", "text leaves the tower alone"),
    }
    assert nothing["pixels matter"] == "a text family has no images"
    padded = found(check_family(tiny("mllama")))["alone = packed"]
    assert (padded.status, padded.why) == (
        "cannot",
        "the entry says that this family's rows are padded, never packed",
    )
    whole = check_family(tiny("qwen2_5_vl"))
    assert [result.name for result in whole.results if result.status == "cannot"] == []


# Planted faults


def with_entry(name: str, **changes: Any) -> Callable[[pytest.MonkeyPatch], Subject]:
    """A subject whose family's entry says something else."""

    def made(patch: pytest.MonkeyPatch) -> Subject:
        patch.setitem(FAMILIES, name, replace(FAMILIES[name], **changes))
        return open_subject(tiny(name))

    return made


def with_key(name: str, key: str, changed: Key | None) -> Callable[[pytest.MonkeyPatch], Subject]:
    """A subject whose entry has one key otherwise, or not at all."""
    keys = {n: k for n, k in FAMILIES[name].keys.items() if n != key}
    return with_entry(name, keys=keys | ({key: changed} if changed else {}))


def with_processor(change: Callable[[dict], dict]) -> Callable[[pytest.MonkeyPatch], Subject]:
    """A subject whose processor's output is changed on its way to the renderer."""

    class Changed:
        def __init__(self, inner: Any):
            self.inner = inner

        def __call__(self, **given: Any) -> dict:
            return change(dict(self.inner(**given)))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    def made(patch: pytest.MonkeyPatch) -> Subject:
        subject = open_subject(tiny("qwen2_5_vl"))
        subject.processor.inner = Changed(subject.processor.inner)
        return subject

    return made


def with_examples(change: Callable[[Example], None]) -> Callable[[pytest.MonkeyPatch], Subject]:
    """A subject whose renderer hands out changed examples."""

    def made(patch: pytest.MonkeyPatch) -> Subject:
        subject = open_subject(tiny("qwen2_5_vl"))
        render = subject.renderer.example

        def example(row: Conversation) -> Example:
            made = render(row)
            if made.images > 1:
                change(made)
            return made

        patch.setattr(subject.renderer, "example", example)
        return subject

    return made


def one_dimensional(patch: pytest.MonkeyPatch) -> Subject:
    subject = open_subject(tiny("qwen2_5_vl"))
    own = subject.renderer.positions
    patch.setattr(subject.renderer, "positions", lambda fields: own(fields)[:1].repeat(4, 1))
    return subject


def leaking_bounds(patch: pytest.MonkeyPatch) -> Subject:
    def one_row(lengths: list[int] | None, device: torch.device) -> Any:
        return packed_rows(lengths and [sum(lengths)], device)

    patch.setattr(policy_module, "packed_rows", one_row)
    return open_subject(tiny("qwen2_5_vl"))


def leaking_positions(patch: pytest.MonkeyPatch) -> Subject:
    own = Batch.pack

    def pack(self: Batch) -> dict[str, torch.Tensor]:
        inputs = own(self)
        return inputs | {"positions": torch.arange(inputs["input_ids"].shape[1])[None, None]}

    patch.setattr(Batch, "pack", pack)
    return open_subject(tiny("gemma3"))


def spans(begin: int, end: int) -> Callable[[pytest.MonkeyPatch], Subject]:
    """A subject whose answers begin and end some characters too early."""

    def made(patch: pytest.MonkeyPatch) -> Subject:
        subject = open_subject(tiny("qwen2_5_vl"))
        own = subject.renderer.template.answers
        patch.setattr(
            subject.renderer.template,
            "answers",
            lambda *of: [slice(span.start - begin, span.stop - end) for span in own(*of)],
        )
        return subject

    return made


def closed_gates(patch: pytest.MonkeyPatch) -> Subject:
    subject = open_subject(tiny("mllama"))
    for name, parameter in subject.policy.hf.named_parameters():
        if name.endswith(("cross_attn_attn_gate", "cross_attn_mlp_gate")):
            parameter.data.zero_()
    return subject


def costly_tower(patch: pytest.MonkeyPatch) -> Subject:
    subject = open_subject(tiny("qwen2_5_vl"))

    def ask(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        return out + torch.zeros(1, requires_grad=True)

    subject.policy.hf.model.visual.patch_embed.register_forward_hook(ask)
    return subject


class Loud:
    """What stands in the place of the blank picture's features: zero times it is not zero."""

    def __init__(self, features: torch.Tensor):
        self.features = features

    def __rmul__(self, _: float) -> torch.Tensor:
        return 1e-3 * self.features


def loud_blank(patch: pytest.MonkeyPatch) -> Subject:
    subject = open_subject(tiny("qwen2_5_vl"))
    own = subject.policy._dummy_features
    patch.setattr(subject.policy, "_dummy_features", lambda images: Loud(own(images)))
    return subject


def without_a_tensor(patch: pytest.MonkeyPatch) -> Subject:
    def fill(hf: Any, path: str, parallel: Any) -> None:
        before = hf.lm_head.weight.clone()
        fill_from_checkpoint(hf, path, parallel)
        hf.lm_head.weight.data.copy_(before)

    patch.setattr(saved_check, "fill_from_checkpoint", fill)
    return open_subject(tiny("mllama"))


def drop_second(example: Example) -> None:
    grid = example.fields["image_grid_thw"]
    pixels = list(example.fields["pixel_values"].split(grid.prod(dim=1).tolist()))
    example.fields["pixel_values"] = torch.cat([pixels[0], *pixels[2:]])
    example.fields["image_grid_thw"] = torch.cat([grid[:1], grid[2:]])


def repeat_first(example: Example) -> None:
    patches = int(example.fields["image_grid_thw"][0].prod())
    pixels = example.fields["pixel_values"]
    pixels[patches : 2 * patches] = pixels[:patches]


# What is wrong, what of the grid must fail, and words of the first of these.
def parts_of(name: str, **changed: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return FAMILIES[name].parts | changed


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], Subject], set[str], str]] = {
    "tower and projector are taken for each other": (
        with_entry(
            "internvl",
            parts=parts_of(
                "internvl",
                vision=FAMILIES["internvl"].parts["projector"],
                projector=FAMILIES["internvl"].parts["vision"],
            ),
        ),
        {"layer classes exist"},
        "is in the part 'projector', expected 'vision'",
    ),
    "the head is somewhere else": (
        with_entry("internvl", parts=parts_of("internvl", head=("model.language_model.norm",))),
        {"parts cover the model"},
        "parts: head is at model.language_model.norm, and in the model at 'lm_head'",
    ),
    "1-D positions": (
        one_dimensional,
        {"loss = the family's own", "positions matter"},
        r"drawn row 1 \(1 images\), token \d+ 'I': -\d",
    ),
    "attention over all packed rows": (
        leaking_bounds,
        {"alone = packed"},
        r"drawn row 1 \(1 images\), token \d+ 'I': -\d",
    ),
    "packed positions that do not restart": (
        leaking_positions,
        {"alone = packed", "keys survive every operation"},
        r"drawn row 1 \(1 images\), token \d+ 'I': -\d",
    ),
    "a key that positions need is dropped": (
        with_processor(lambda out: {n: v for n, v in out.items() if n != "mm_token_type_ids"}),
        {"rows render"},
        r"drawn row 1 \(1 images\): KeyError: 'mm_token_type_ids'",
    ),
    "a key that positions need is all zeros": (
        with_processor(lambda out: out | {"mm_token_type_ids": 0 * out["mm_token_type_ids"]}),
        {"loss = the family's own", "rows = the processor's", "positions matter"},
        r"drawn row 1 \(1 images\), token \d+ 'I'",
    ),
    "a key that the mask needs is not in the entry": (
        with_key("gemma3", "token_type_ids", None),
        {"loss = the family's own", "keys are known"},
        r"drawn row 1 \(1 images\), token \d+ 'I'",
    ),
    "pixels of the second image are dropped": (
        with_examples(drop_second),
        {"rows run alone", "rows = the processor's"},
        r"drawn row 2 \(2 images\): ValueError: .*tokens: 12, features: 6",
    ),
    "the second image is the first": (
        with_examples(repeat_first),
        {
            *("loss = the family's own", "rows = the processor's"),
            "joined as the processor joins",
        },
        r"drawn row 2 \(2 images\), token \d+ 'A'",
    ),
    "the header carries loss": (
        spans(len("assistant\n"), 0),
        LABELS,
        r"answer 1 carries loss on 'assistant\\nYes.<\|im_end\|>', expected 'Yes.<\|im_end\|>'",
    ),
    "the end of turn carries none": (
        spans(0, len("<|im_end|>")),
        LABELS,
        r"answer 1 ends with 'Yes.', not with '<\|im_end\|>'",
    ),
    "a wrong fill": (
        with_key("qwen2_5_vl", "mm_token_type_ids", Key("token", fill=1)),
        {"joined as the processor joins"},
        "mm_token_type_ids is padded with 1, by the processor with 0",
    ),
    "a wrong dimension of a key": (
        with_key("minicpmv4_6", "pixel_values", Key("packed")),
        {"alone = padded"},
        "RuntimeError: The size of tensor",
    ),
    "a wrong kind of a key": (
        with_key("qwen2_5_vl", "image_grid_thw", Key("padded")),
        {"rows render"},
        r"drawn row 1 \(1 images\): IndexError",
    ),
    "unused is what learns": (
        with_entry("qwen2_5_vl", unused=("model.visual.merger",)),
        {"every parameter learns"},
        "model.visual.merger learns, and the entry has it in `unused`",
    ),
    "unused is left out": (
        with_entry("llava_onevision", unused=()),
        {"every parameter learns"},
        "model.vision_tower.post_layernorm gets no gradient",
    ),
    "rows that cannot be packed": (
        with_entry("minicpmv4_6", can_pack=True),
        {"alone = packed"},
        r"drawn row \d \(\d images\), token \d+",
    ),
    "another family's layers": (
        with_entry("qwen2_5_vl", decoder_layers=("Qwen2VLDecoderLayer",)),
        {"layer classes exist"},
        "the model has no Qwen2VLDecoderLayer; decoder_layers lacks Qwen2_5_VLDecoderLayer",
    ),
    "a part that is not there": (
        with_entry("llama", parts=FAMILIES["llama"].parts | {"head": ("score",)}),
        {"parts cover the model"},
        "head is at 'score', and the model has no such module or parameter",
    ),
    "an image token that may be sampled": (
        with_entry("qwen2_5_vl", image_tokens=("<|vision_start|>", "<|vision_end|>")),
        {"tokens and ids exist"},
        r"image_tokens lacks '<\|image_pad\|>', the config's image_token_id",
    ),
    "pictures that the model does not see": (
        closed_gates,
        {
            *("pixel_values matters", "cross_attention_mask matters", "pixels matter"),
            *("order of images matters", "same-size images differ", "every parameter learns"),
        },
        "not used: dropping this padded key changes nothing",
    ),
    "a frozen tower that costs memory": (
        costly_tower,
        {"frozen parts cost nothing"},
        r"[\d,]+ bytes of the frozen tower are kept for the backward pass",
    ),
    "a blank picture that text rows learn from": (
        loud_blank,
        {"alone = padded", "alone = packed", "loss = the family's own"},
        r"drawn row 0 \(0 images\), token \d+",
    ),
    "a tensor that is not read back": (
        without_a_tensor,
        {"saved = loaded"},
        r"drawn row 3 \(3 images\), token \d+ .*: -\d\.\d+ and nan",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_what_it_should(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, wanted, words = FAULTS[fault]
    wrong = failures(run_grid(make(monkeypatch)))
    assert set(wrong) == wanted, wrong
    assert re.search(words, next(iter(wrong.values())))


def louder(subject: Subject) -> Subject:
    """With every weight matrix doubled, as in deep models, rounding is amplified."""
    with torch.no_grad():
        for parameter in subject.policy.parameters():
            if parameter.dim() > 1:
                parameter *= 2
    return subject


def test_the_limit_follows_what_a_model_makes_of_rounding_and_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm, right = open_subject(tiny("qwen2_5_vl")), louder(open_subject(tiny("qwen2_5_vl")))
    assert calm.close == 1e-5
    assert 1e-5 < right.close < 1e-4
    assert padded_is_alone(right).holds
    assert packed_is_alone(right).holds
    leaking = louder(leaking_bounds(monkeypatch))
    assert leaking.close == right.close
    found = packed_is_alone(leaking)
    assert not found.holds
    assert (found.figure or 0) > 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen2_5_vl", "llama", "mllama", "gemma3"])
def test_the_grid_passes_on_a_gpu(name: str) -> None:
    report = check_family(tiny(name))
    assert report.device == "cuda"
    assert failures(report) == {}


def test_what_needs_a_failed_property_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    make = FAULTS["a key that positions need is dropped"][0]
    results = found(run_grid(make(monkeypatch)))
    assert results["alone = padded"].status == "cannot"
    assert results["alone = padded"].why == "'rows render' fails"
    assert results["layer classes exist"].status == "pass"


# Rows of a file


def test_rows_of_a_file_stand_in_for_drawn_ones(tmp_path: Path) -> None:
    file = write_rows(tmp_path, [1, 0, 2, 0, 3, 0, 0, 1, 1, 1], ((56, 56), (84, 56)))
    subject = open_subject(tiny("qwen2_5_vl"), str(file))
    assert len(subject.rows) == 8
    assert failures(run_grid(subject)) == {}
    own = subject.renderer.positions
    subject = open_subject(tiny("qwen2_5_vl"), str(file))
    subject.renderer.positions = lambda fields: own(fields)[:1].repeat(4, 1)  # type: ignore
    why = found(run_grid(subject))["loss = the family's own"].why
    assert why.startswith("rows.json row 0 (id 'r0'")


def test_a_row_of_a_file_without_its_picture_is_no_fault_of_the_family(tmp_path: Path) -> None:
    file = write_rows(tmp_path, [0, 1])
    (tmp_path / "0.png").unlink()
    with pytest.raises(InputError, match=r"--rows .*rows.json: .*row 1 \(id 'r1'.*missing_image"):
        open_subject(tiny("qwen2_5_vl"), str(file))


# A family without an entry


@pytest.mark.parametrize("name", QUICK)
def test_a_starting_entry_is_made_for_an_unknown_family(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, model = FAMILIES[name], tiny(name)
    monkeypatch.delitem(FAMILIES, name)
    with pytest.raises(UnknownFamily, match=f"save the one above as vireo/families/{name}.py") as e:
        check_family(model)
    made: dict[str, Any] = {}
    exec(e.value.entry, made)
    entry: Family = made["FAMILY"]
    assert e.value.entry == starting_entry(model)
    assert (entry.keys, entry.positions) == (family.keys, family.positions)
    assert (entry.can_pack, entry.can_mix) == (family.can_pack, family.can_mix)
    assert entry.decoder_layers == family.decoder_layers
    assert entry.placeholder == family.placeholder
    assert set(entry.image_tokens) <= set(family.image_tokens)
    monkeypatch.setitem(FAMILIES, name, entry)
    assert failures(check_family(model)) == {}


def test_a_starting_entry_shows_the_shapes_that_were_seen() -> None:
    text = starting_entry(tiny("qwen2_5_vl"))
    assert re.search(r'"image_grid_thw": Key\("packed"\),  # \[1, 3\], of two \[2, 3\]\n', text)
    assert all(len(line) <= 100 for line in text.splitlines())


# The command


def test_the_command_prints_a_line_a_property_and_writes_a_report(tmp_path, capsys) -> None:
    out = tmp_path / "found" / "report.json"
    assert cli.main(["check-family", tiny("llama"), "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"llama: 0\.\d M parameters, 0\.00 GiB in float32 on the c", lines[0])
    assert re.fullmatch(r"pass    alone = packed                  \d\.\de-\d\d <= 1e-05", lines[4])
    report = json.loads(out.read_text())
    assert len(report["results"]) == len(lines) - 2
    assert report["family"] == "llama"
    assert set(report["versions"]) == {"vireo", "torch", "transformers"}


def test_the_exit_code_is_1_where_a_property_fails(monkeypatch, capsys) -> None:
    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], unused=("model.norm",)))
    assert cli.main(["check-family", tiny("llama")]) == 1
    assert "\nfail    every parameter learns          model.norm learns" in capsys.readouterr().out


def test_an_unknown_family_gets_its_entry_on_standard_output(monkeypatch, capsys) -> None:
    entry = starting_entry(tiny("llama"))
    monkeypatch.delitem(FAMILIES, "llama")
    assert cli.main(["check-family", tiny("llama")]) == 2
    printed = capsys.readouterr()
    assert printed.out == entry
    assert printed.err.startswith("error: no entry for the model family 'llama': save")


def test_weights_that_do_not_fit_the_memory_are_refused_before_they_are_read(monkeypatch) -> None:
    from vireo.checks import subject

    monkeypatch.setattr(subject.os, "sysconf", lambda name: 1)
    with pytest.raises(InputError, match="GiB in float32, and the cpu has 0"):
        open_subject(tiny("llama"))


def test_a_figure_that_is_no_number_never_holds() -> None:
    nan = float("nan")
    assert not Finding(nan, 1e-5).holds
    assert not Finding(nan, 1e-5, above=True).holds
    assert Finding(1e-5, 1e-5).holds
    assert not Finding(1e-5, 1e-5, above=True).holds
    assert Result("a", "b", "fail", 2e-5, 1e-5, why="w").line.endswith("2.0e-05 > 1e-05  w")
    assert Result("a", "b", "fail", 2e-5, 1e-3, True).line.endswith("2.0e-05 <= 0.001")
    assert listed(list("abcde")).wrong == "a; b; c; and 2 more"


# The matrix


def test_the_matrix_shows_entries_and_the_last_report_of_each_family() -> None:
    old = Report("m", "llama", 1, "cpu", "2026-01-01", {"torch": "1", "transformers": "2"})
    new = replace(old, date="2026-02-01", versions={"torch": "3", "transformers": "4"})
    old.results.append(Result("loss", "loss = the family's own", "fail", why="w"))
    new.results = [
        Result("loss", "loss = the family's own", "pass"),
        Result("keys", "keys are known", "cannot", why="w"),
        Result("weights", "saved = loaded", "fail", why="w"),
    ]
    text = matrix.page([new.as_dict(), old.as_dict()])
    assert (
        "| llama | - | pass | - | - | - | - | - | - | fail: saved = loaded "
        "| 2026-02-01, torch 3, transformers 4, cpu |" in text
    )
    assert "| qwen3 | not run |" in text
    assert (
        "| mllama | vision | padded (why: below) | sdpa | 1-D | rows with as many images |" in text
    )


def test_the_matrix_refuses_what_is_no_report(tmp_path, capsys) -> None:
    file = tmp_path / "a.json"
    file.write_text("{}")
    assert matrix.main([str(file)]) == 2
    assert "is no report of `vireo check-family --json`" in capsys.readouterr().err


def test_the_page_of_families_says_what_the_entries_say() -> None:
    text = (ROOT / "docs" / "families.md").read_text()
    for family in FAMILIES.values():
        assert f"| {' | '.join(matrix.static_row(family))} |\n" in text
        assert all(f"- {family.name}: {limit}\n" in text for limit in family.limits)
        if not family.can_pack:
            assert any("padded" in limit for limit in family.limits), family.name
