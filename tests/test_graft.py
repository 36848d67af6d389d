"""A text model with a new tower: on text it is what it was, and its pictures can be learned."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.ranks.cases import engine_for
from tests.rows import losses, write_rows
from tests.tiny_models import assistant, noise, row, scratch, user
from vireo import cli
from vireo import parallel as parallel_module
from vireo.checks.grid import check_family
from vireo.data.conversation import read_rows
from vireo.data.ragged import Batch
from vireo.data.render import Renderer
from vireo.errors import InputError
from vireo.families import get_family
from vireo.families.graft import builder_of
from vireo.families.tiny import build, templates
from vireo.families.tiny.llava import text_config
from vireo.families.tiny.sizes import TEXT
from vireo.families.tiny.tokenizer import CHATML, LLAMA, Tokens, make_tokenizer
from vireo.models.graft import graft, with_images
from vireo.models.names import part_of
from vireo.models.policy import Policy
from vireo.settings import load_settings
from vireo.trainers import registry
from vireo.training.checkpoint import checkpoints
from vireo.training.export import export

SPARE, FULL = 384, 380  # rows of the embeddings of 380 tokens
PLAIN = Tokens(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", "<|endoftext|>")
TEMPLATES = {"llama": templates.llama(), "chatml": templates.chatml(default_system="Be brief.")}


def text_model(out: Path, kind: str, tied: bool, rows: int, tokens: Tokens | None = None) -> Path:
    """A tiny random text model of any type, in a folder as `save_pretrained` writes it."""
    llama = kind in ("llama", "mistral")
    template = TEMPLATES["llama" if llama else "chatml"]
    tokenizer = make_tokenizer(template, 4096, tokens or (LLAMA if llama else PLAIN))
    changes = {"vocab_size": rows, "tie_word_embeddings": tied}
    config = text_config(kind, TEXT["test"], changes, tokenizer)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stop = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    options = {"eos_token_id": stop, "do_sample": True, "top_k": 7}
    model.generation_config = transformers.GenerationConfig(**options)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


@cache
def text_folder(kind: str, tied: bool, rows: int) -> Path:
    return text_model(scratch() / f"{kind}-{tied}-{rows}", kind, tied, rows)


@cache
def grafted(family: str, kind: str, tied: bool, rows: int) -> Path:
    out = scratch() / f"{family}-of-{kind}-{tied}-{rows}"
    graft(str(text_folder(kind, tied, rows)), family, out, tower="demo")
    return out


MADE = [
    ("llava", "llama", True, SPARE),
    ("llava", "mistral", False, FULL),
    ("llava", "qwen2", True, FULL),
    ("llava", "qwen3", False, SPARE),
    ("smolvlm", "llama", True, SPARE),
    ("smolvlm", "llama", False, FULL),
    ("qwen2_5_vl", "qwen2", True, FULL),
    ("qwen2_5_vl", "qwen2", False, SPARE),
]
made = pytest.mark.parametrize(("family", "kind", "tied", "rows"), MADE)
ONE_EACH = [MADE[3], MADE[5], MADE[6]]
one_each = pytest.mark.parametrize(("family", "kind", "tied", "rows"), ONE_EACH)


def open_models(family: str, *of: Any) -> tuple[Any, Any]:
    """The text model and the new one, by transformers alone; none of its tensors is made up."""
    old = transformers.AutoModelForCausalLM.from_pretrained(text_folder(*of)).eval()
    new, info = transformers.AutoModelForImageTextToText.from_pretrained(
        grafted(family, *of), output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return old, new.eval()


# -- on text it is what it was -------------------------------------------------------------------


@made
def test_text_has_the_logits_of_the_text_model(family, kind, tied, rows) -> None:
    old, new = open_models(family, kind, tied, rows)
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(FULL, (2, 60), generator=chance)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0  # padded on the left
    with torch.no_grad():
        wanted = old(input_ids=ids, attention_mask=mask).logits
        found = new(input_ids=ids, attention_mask=mask).logits[..., :rows]
    assert torch.equal(found[mask.bool()], wanted[mask.bool()])
    options = {"max_new_tokens": 8, "do_sample": False}
    wanted, found = (m.generate(ids[1:], **options)[0].tolist() for m in (old, new))
    assert found == wanted


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    lm = text_model(tmp_path / "lm", "llama", True, FULL)
    old = transformers.AutoModelForCausalLM.from_pretrained(lm, dtype=torch.bfloat16).eval()
    old.save_pretrained(lm)
    graft(str(lm), "llava", tmp_path / "new", tower="demo")
    assert {t.dtype for t in tensors(tmp_path / "new").values()} == {torch.bfloat16}
    auto = transformers.AutoModelForImageTextToText
    new = auto.from_pretrained(tmp_path / "new", dtype="auto").eval()
    ids = torch.arange(FULL)[None]
    assert torch.equal(new(input_ids=ids).logits[..., :FULL], old(input_ids=ids).logits)
    assert str(tmp_path) not in (tmp_path / "new" / "config.json").read_text()


@made
def test_a_row_of_text_is_the_text_models_row(family, kind, tied, rows) -> None:
    """Through the whole data path: text, tokens and labels."""
    old, new = text_renderer(kind, tied, rows), Renderer(str(grafted(family, kind, tied, rows)))
    said = row(user("Is it <b>red</b>?\n"), assistant(" Yes, é."), user("Why?"), assistant("So."))
    wanted, found = old(said), new.example(said)
    for name in ("input_ids", "labels"):
        assert torch.equal(found.fields[name], wanted[name]), name


def text_renderer(kind: str, tied: bool, rows: int) -> Any:
    """What a renderer makes of a row for the text model, by any family of text models."""
    folder = scratch() / f"rendered-{kind}-{tied}-{rows}"
    if not folder.exists():
        shutil.copytree(text_folder(kind, tied, rows), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    made = Renderer(str(folder))
    return lambda said: made.example(said).fields


# -- weights -------------------------------------------------------------------------------------


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder by the names that their model has in memory."""
    config = transformers.AutoConfig.from_pretrained(folder)
    vision = hasattr(config, "vision_config")
    auto = "AutoModelForImageTextToText" if vision else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_pretrained(folder, dtype="auto")
    return dict(model.state_dict())


@made
def test_every_old_weight_is_there_and_new_rows_are_the_mean(family, kind, tied, rows) -> None:
    old, new = tensors(text_folder(kind, tied, rows)), tensors(grafted(family, kind, tied, rows))
    entry = get_family(family)
    names = {"model.": f"{entry.parts['language'][0]}.", "lm_head.": "lm_head."}
    room = SPARE if family == "llava" else 448
    for name, wanted in old.items():
        prefix = next(p for p in names if name.startswith(p))
        found = new.pop(names[prefix] + name.removeprefix(prefix))
        assert torch.equal(found[: len(wanted)], wanted), name
        if "embed_tokens" in name or "lm_head" in name:
            assert len(found) == room, name
            mean = wanted.mean(0).expand(room - rows, -1)
            torch.testing.assert_close(found[rows:], mean, rtol=0, atol=1e-6)
        else:
            assert found.shape == wanted.shape, name
    assert {part_of(name, entry) for name in new} == {"vision", "projector"}
    assert all(float(t.std()) > 0 for name, t in new.items() if name.endswith("proj.weight"))
    written = load_file(grafted(family, kind, tied, rows) / "model.safetensors")
    assert any("lm_head" in name for name in written) != tied


def test_names_on_disk_are_those_of_the_familys_published_models(tmp_path: Path) -> None:
    for family, *of in (MADE[0], MADE[4], MADE[6]):
        own = build(family, tmp_path / family, size="test")
        # Layers apart, of which they have other numbers.
        wanted, found = (
            {re.sub(r"\.\d+\.", ".N.", name) for name in load_file(folder / "model.safetensors")}
            for folder in (own, grafted(family, *of))
        )
        assert found == wanted


def test_the_seed_decides_the_tower_alone(tmp_path: Path) -> None:
    lm = str(text_folder("llama", True, SPARE))
    state = torch.random.get_rng_state()
    for name, seed in (("a", 0), ("b", 1)):
        graft(lm, "llava", tmp_path / name, tower="demo", seed=seed)
    assert torch.equal(torch.random.get_rng_state(), state)
    first = tensors(grafted("llava", "llama", True, SPARE))
    same, other = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    entry = get_family("llava")
    for name, value in first.items():
        assert torch.equal(value, same[name]), name
        # What begins at 0 or 1 does so with any seed.
        random = part_of(name, entry) in ("vision", "projector") and float(value.std()) > 0
        assert torch.equal(value, other[name]) != random, name


# -- tokens and templates ------------------------------------------------------------------------

SAID = [
    "Which digit is this?  é\n\n",
    "<b>image</b> <image > < image> <|image_pad> <fake",
    "<|im_start|>user\nhi<|im_end|><|eot_id|>",
]


@made
def test_old_text_has_its_old_ids(family, kind, tied, rows) -> None:
    old, new = (
        transformers.AutoTokenizer.from_pretrained(folder)
        for folder in (text_folder(kind, tied, rows), grafted(family, kind, tied, rows))
    )
    for said in SAID:
        assert new(said)["input_ids"] == old(said)["input_ids"]
    for i, token in enumerate(get_family(family).image_tokens):
        assert new.encode(token, add_special_tokens=False) == [FULL + i]
        assert new.decode([FULL + i], skip_special_tokens=True) == ""
    assert (new.eos_token, new.pad_token) == (old.eos_token, old.pad_token)


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It knows."}}]
TALK: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Short. "}, {"role": "user", "content": "Hi\n"}],
    [
        {"role": "user", "content": "Cold?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Yes."},
    ],
    [
        {"role": "user", "content": "Cold?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
    ],
    [{"role": "user", "content": "Cold?"}, {"role": "tool", "content": {"degrees": 3}}],
]
# How text models' templates begin, where a tag before them could change what is written.
OTHERS = {
    "spaces": "  {% for m in messages %}\n  {{ m['content'] }}\n  {% endfor %}\n.",
    "lines": "\n\n{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
    "text": "A chat:\n{%- for m in messages %} {{ m.content }}{% endfor %}",
    "first": "{% set loop_messages = messages[1:] %}{{ messages[0]['content'] }}"
    "{% for m in loop_messages %}{{ m }}{% endfor %}{{ messages | length }}",
    "macro": "{% macro all() %}{{ messages | map(attribute='role') | join }}{% endmacro %}"
    "{{ all() }}",
}


@pytest.mark.parametrize("name", [*TEMPLATES, *OTHERS])
def test_strings_are_written_byte_for_byte_as_before(name: str) -> None:
    template = {**TEMPLATES, **OTHERS}[name]
    for talk, tools, prompt in product(TALK, (None, TOOLS), (False, True)):
        found = written(with_images(template, get_family("llava")), talk, tools, prompt)
        assert found == written(template, talk, tools, prompt)
        assert name in OTHERS or talk is TALK[-1] or not found.startswith("refused")


def written(template: str, talk: list[dict], tools: Any, prompt: bool) -> str:
    """What a template writes, or how it refuses: some take no turn without content."""
    options = {"tools": tools, "tokenize": False, "add_generation_prompt": prompt}
    try:
        return plain_tokenizer().apply_chat_template(talk, chat_template=template, **options)
    except Exception as error:  # a template is a program of its own
        return f"refused: {type(error).__name__}: {error}"


@cache
def plain_tokenizer() -> Any:
    return make_tokenizer(TEMPLATES["chatml"], 4096, PLAIN)


@pytest.mark.parametrize("family", ["llava", "smolvlm", "qwen2_5_vl"])
def test_parts_become_one_string_with_a_placeholder_for_each_image(family: str) -> None:
    entry = get_family(family)
    template = with_images(TEMPLATES["chatml"], entry)
    parts = [
        {"type": "text", "text": "See "},
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text", "text": "?"},
    ]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": []}]
    found = plain_tokenizer().apply_chat_template(talk, chat_template=template, tokenize=False)
    assert found == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\nSee {2 * entry.placeholder}?<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
    )
    talk = [{"role": "user", "content": parts, "name": "Ann"}]
    template = with_images("{{ messages | tojson }}", entry)
    found = plain_tokenizer().apply_chat_template(talk, chat_template=template, tokenize=False)
    (turn,) = json.loads(found)
    assert turn == {"role": "user", "content": f"See {2 * entry.placeholder}?", "name": "Ann"}
    talk = [{"role": "user", "content": [{"type": "video"}]}]
    with pytest.raises(Exception, match="no content part of type video"):
        plain_tokenizer().apply_chat_template(talk, chat_template=template, tokenize=False)


def test_the_stop_tokens_are_the_text_models(tmp_path: Path) -> None:
    lm = shutil.copytree(text_folder("qwen2", True, FULL), tmp_path / "lm")
    new = grafted("qwen2_5_vl", "qwen2", True, FULL)
    name = "generation_config.json"
    assert (new / name).read_bytes() == (lm / name).read_bytes()
    (lm / name).unlink()
    graft(str(lm), "qwen2_5_vl", tmp_path / "new", tower="demo")
    config = json.loads((lm / "config.json").read_text())
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "new")
    assert (found.eos_token_id, found.top_k) == (config["eos_token_id"], None)


# -- what it can learn ---------------------------------------------------------------------------


@one_each
def test_the_familys_grid_holds(family, kind, tied, rows) -> None:
    report = check_family(str(grafted(family, kind, tied, rows)))
    assert report.failed == []


def train(folder: Path, model: Path, data: Path, *more: str) -> Path:
    settings = load_settings(
        [
            *(f"--vlm_model_name_or_path={model}", f"--train_file={data}"),
            *(f"--output_dir={folder}", "--num_workers=0", "--report_to=none"),
            *("--per_device_train_batch_size=8", "--lr_scheduler=constant", *more),
        ]
    )
    assert registry.find(settings.trainer)(settings) == 0
    return checkpoints(folder / "checkpoints")[-1]


@one_each
def test_pre_alignment_trains_the_projector_alone(family, kind, tied, rows, tmp_path) -> None:
    model, entry = grafted(family, kind, tied, rows), get_family(family)
    data = write_rows(tmp_path / "data", [1, 1, 2, 1, 0, 1, 1, 1])
    flags = ("--freeze_language", "--freeze_vision", "--lr=1e-2", "--max_steps=12")
    run = train(tmp_path / "run", model, data, *flags)
    found = losses(tmp_path / "run")
    assert found[-1] < 0.9 * found[0]
    before, after = tensors(model), tensors(export(run, tmp_path / "export"))
    for name, value in before.items():
        still = part_of(name, entry) != "projector"
        assert torch.equal(after[name], value) == still, name


@pytest.mark.parametrize(("family", "kind", "tied", "rows"), [MADE[5], MADE[6]])
def test_enlarged_embeddings_train_resume_and_export(family, kind, tied, rows, tmp_path) -> None:
    model = grafted(family, kind, tied, rows)
    data = write_rows(tmp_path / "data", [1, 0, 2, 1])
    flags = ("--freeze_vision=false", "--lr=1e-2")
    whole = train(tmp_path / "whole", model, data, *flags, "--max_steps=3")
    train(tmp_path / "parted", model, data, *flags, "--max_steps=1")
    train(tmp_path / "parted", model, data, *flags, "--max_steps=3", "--resume=auto")
    assert losses(tmp_path / "parted") == pytest.approx(losses(tmp_path / "whole"), abs=1e-6)
    out = export(whole, tmp_path / "export")
    before, after = tensors(model), tensors(out)
    names = [f"{get_family(family).parts['embeddings'][0]}.weight", "lm_head.weight"]
    for name in names:
        assert after[name].shape == before[name].shape == (448, 64)
        assert not torch.equal(after[name][rows:], before[name][rows:])
    assert torch.equal(after[names[0]], after[names[1]]) == tied
    example = Renderer(str(out)).example(read_rows(data)[0])
    engine, _ = engine_for(str(out), parallel_module.start(shard=False))
    inputs = Batch.of([example]).pad(engine.pad_id)
    own = {n: v for n, v in inputs.items() if n not in ("labels", "loss_weight", "positions")}
    plain = transformers.AutoModelForImageTextToText.from_pretrained(out).eval()
    with torch.no_grad():
        ours = engine.policy(inputs)
        loss = plain(**own, labels=inputs["labels"]).loss
    assert float(-ours.mean()) == pytest.approx(float(loss), abs=1e-5)


# -- the published towers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind", "size", "tokens", "layers"),
    [
        ("llava", "llama", (500, 300), 576, 24),
        ("smolvlm", "llama", (512, 64), 5 * 64, 12),  # enlarged to 2048x256: 4 tiles and the whole
        ("qwen2_5_vl", "qwen2", (112, 112), 16, 32),
    ],
)
def test_the_published_tower_has_as_many_features_as_its_processor_has_tokens(
    family, kind, size, tokens, layers, tmp_path, monkeypatch
) -> None:
    """With two of its layers, which are all alike."""
    builder = builder_of(family)
    config, _ = builder.make(*text_and_tokenizer(family, kind), "published")
    vision = config.vision_config
    field = "depth" if family == "qwen2_5_vl" else "num_hidden_layers"
    assert getattr(vision, field) == layers
    whole = builder.make

    def shallow(*given: Any) -> tuple[Any, Any]:
        config, processor = whole(*given)
        setattr(config.vision_config, field, 2)
        return config, processor

    monkeypatch.setattr(builder, "make", shallow)
    graft(str(text_folder(kind, True, SPARE)), family, tmp_path / "new")
    renderer = Renderer(str(tmp_path / "new"))
    said = row(user(0, "What is it?"), assistant("A cat."), images=[noise(*size)])
    example = renderer.example(said)
    image_id = renderer.config.image_token_id
    assert int((example.fields["input_ids"] == image_id).sum()) == tokens
    hf = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "new")
    with torch.no_grad():
        policy = Policy(hf.eval(), renderer.family, None)
        assert policy(Batch.of([example]).pack()).isfinite().all()


def text_and_tokenizer(family: str, kind: str) -> tuple[Any, Any]:
    folder = text_folder(kind, True, SPARE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(get_family(family).image_tokens), special_tokens=True)
    return transformers.AutoConfig.from_pretrained(folder), tokenizer


# -- what is refused -----------------------------------------------------------------------------


def refused(lm: Path, out: Path, words: str, family: str = "llava") -> None:
    with pytest.raises(InputError, match=words):
        graft(str(lm), family, out, tower="demo")
    assert not out.exists() or any(out.iterdir())
    assert not out.with_name(f".writing-{out.name}").exists()


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    vision = build("qwen2_vl", tmp_path / "vision", size="test")
    words = "of type 'qwen2_vl'; llava takes a text model of type llama, mistral, qwen2, qwen3"
    refused(vision, out, words)
    refused(text_folder("qwen3", False, SPARE), out, "takes a text model of type llama$", "smolvlm")
    refused(text_folder("llama", True, SPARE), out, "of type qwen2$", "qwen2_5_vl")
    refused(tmp_path, out, "is no model that can be read")
    refused(tmp_path / "none", out, "no model folder at")
    words = "--family mllama: .*llava, qwen2_5_vl, smolvlm can be made"
    refused(text_folder("llama", True, SPARE), out, words, "mllama")


def test_a_tower_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--tower small: expected published or demo"):
        graft(str(text_folder("llama", True, SPARE)), "llava", tmp_path / "out", tower="small")


def test_sizes_that_the_family_cannot_have_are_refused(tmp_path: Path) -> None:
    lm = shutil.copytree(text_folder("qwen2", True, SPARE), tmp_path / "lm")
    config = transformers.AutoConfig.from_pretrained(lm)
    config.head_dim = 64  # twice what its width and number of heads say
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(lm)
    refused(lm, tmp_path / "out", "does not fit qwen2_5_vl: .*size mismatch.*q_proj", "qwen2_5_vl")


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    lm = text_folder("llama", True, SPARE)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    refused(lm, tmp_path / "out", "out is not empty")
    with pytest.raises(InputError, match=r"mine\.txt is not empty"):
        graft(str(lm), "llava", tmp_path / "out" / "mine.txt")
    (tmp_path / "empty").mkdir()
    graft(str(lm), "llava", tmp_path / "empty", tower="demo")
    assert Renderer(str(tmp_path / "empty")).family.name == "llava"


def test_a_text_model_without_one_chat_template_is_refused(tmp_path: Path) -> None:
    lm = shutil.copytree(text_folder("llama", True, SPARE), tmp_path / "lm")
    (lm / "chat_template.jinja").unlink()
    refused(lm, tmp_path / "out", "has no chat template, expected one")
    tokenizer = transformers.AutoTokenizer.from_pretrained(lm)
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    tokenizer.save_pretrained(lm)
    refused(lm, tmp_path / "out", "has several chat templates, expected one")


def test_a_chat_template_that_training_refuses_is_refused(tmp_path: Path) -> None:
    lm = shutil.copytree(text_folder("llama", True, SPARE), tmp_path / "lm")
    (lm / "chat_template.jinja").write_text("{{ messages[0].content }}")
    refused(lm, tmp_path / "out", "leaves out what the assistant says")


def test_a_token_that_means_something_else_is_refused(tmp_path: Path) -> None:
    lm, out = shutil.copytree(text_folder("qwen2", True, SPARE), tmp_path / "lm"), tmp_path / "out"
    tokenizer = transformers.AutoTokenizer.from_pretrained(lm)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(lm)
    refused(lm, out, "<image>, which images need in llava, is a word of its tokenizer \\(id 380\\)")
    graft(str(lm), "qwen2_5_vl", tmp_path / "other", tower="demo")  # which has no such token
    tokenizer.add_special_tokens({"pad_token": "<|vision_pad|>"})
    tokenizer.save_pretrained(lm)
    refused(lm, out, r"<\|vision_pad\|>.* is its pad_token", "qwen2_5_vl")
    lm = text_folder("qwen3", False, SPARE)
    lm = shutil.copytree(lm, tmp_path / "written")
    template = TEMPLATES["chatml"] + "<image>"
    (lm / "chat_template.jinja").write_text(template)
    refused(lm, out, "<image>.* stands in its chat template")


def test_control_tokens_that_are_there_already_are_kept(tmp_path: Path) -> None:
    """As in the published Qwen2.5, whose tokenizer has those of its vision models."""
    lm = text_model(tmp_path / "lm", "qwen2", True, SPARE, CHATML)
    done = graft(str(lm), "qwen2_5_vl", tmp_path / "new", tower="demo")
    assert (done.tokens, done.rows) == ((), (SPARE, SPARE))
    old, new = (
        transformers.AutoTokenizer.from_pretrained(folder) for folder in (lm, tmp_path / "new")
    )
    assert new.get_vocab() == old.get_vocab()


# -- the command ---------------------------------------------------------------------------------


def test_the_command_says_what_it_made(tmp_path: Path, capsys) -> None:
    lm, out = text_folder("llama", True, SPARE), tmp_path / "new"
    command = ["graft", "--lm", str(lm), "--family", "smolvlm", "--tower", "demo", str(out)]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    words = "tokens added: 39; rows of embeddings: 448 (384 before); new parameters: 307,200"
    assert words in said
    assert f"wrote {out}" in said
    assert cli.main(command) == 2
    assert "is not empty" in capsys.readouterr().err
