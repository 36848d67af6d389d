"""Families that cut a picture into tiles, or write text round it: SmolVLM, Idefics3, Gemma 3."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache, wraps
from itertools import product
from typing import Any

import PIL.Image
import pytest
import torch
import transformers

from tests.ranks.cases import engine_for
from tests.tiny_models import (
    CAT,
    assistant,
    controls,
    marked,
    noise,
    policy,
    renderer,
    row,
    runs,
    scratch,
    tiny,
    turn,
    user,
    with_newline_runs,
)
from vireo import parallel as parallel_module
from vireo.data.conversation import ImageRef, Turn
from vireo.data.ragged import IGNORE, TRAINER_KEYS, Batch, Example
from vireo.data.render import Renderer
from vireo.errors import InputError, RowError
from vireo.families import get_family
from vireo.families.tiny.gemma3 import finish
from vireo.models.heads import token_logprobs
from vireo.models.names import freeze
from vireo.models.policy import Policy

FAMILIES = ["smolvlm", "idefics3", "gemma3"]
TILED = FAMILIES[:2]
CLOSE = 1e-5  # float32 on a CPU
SIZES = [(56, 56), (40, 150), (120, 90), (9, 9)]  # with tiles of 56: 1, 4, 10 and 1

ROW = r"(<fake_token_around_image><row_\d_col_\d>(<image>){4})+\n"
TILES = r"<fake_token_around_image><global-img>(<image>){4}<fake_token_around_image>"
SLOTS = {
    "smolvlm": rf"(({ROW})+\n)?{TILES}",
    "idefics3": rf"(({ROW})+\n)?{TILES}",
    "gemma3": r"\n\n<start_of_image>(<image_soft_token>){4}<end_of_image>\n\n",
}


def pictures(count: int, start: int = 0) -> list[ImageRef]:
    return [noise(*SIZES[i % 4], seed=i) for i in range(start, start + count)]


def text_of(made: Renderer, example: Example) -> str:
    """What an example says, with what carries loss in «» and each image as IMAGE."""
    return re.sub(SLOTS[made.family.name], "IMAGE", marked(made, example))


# -- text and labels, by hand --------------------------------------------------------------------

SPOKEN = """System: Be brief.<end_of_utterance>
User:IMAGEWhat is it?<end_of_utterance>
Assistant:« A cat.<end_of_utterance>»
User: And IMAGE or IMAGE, IMAGE?<end_of_utterance>
Assistant:« Yes.<end_of_utterance>»
"""
GEMMA = """<bos><start_of_turn>user
Be brief.

IMAGEWhat is it?<end_of_turn>
<start_of_turn>model
«A cat.<end_of_turn>»
<start_of_turn>user
AndIMAGEorIMAGE,IMAGE?<end_of_turn>
<start_of_turn>model
«Yes.<end_of_turn>»
"""
GOLDEN = {
    "smolvlm": "<|im_start|>" + SPOKEN,
    "idefics3": "<|begin_of_text|>" + SPOKEN,
    "gemma3": GEMMA,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_text_of_a_row_and_what_of_it_carries_loss(family):
    """A system turn, images in both questions; Gemma's template trims, and folds the system in."""
    made = renderer(family)
    turns = (
        turn("system", "Be brief."),
        user(0, "What is it?"),
        assistant("A cat."),
        user("And ", 1, " or ", 2, ", ", 3, "?"),
        assistant("Yes."),
    )
    example = made.example(row(*turns, images=pictures(4)))
    assert text_of(made, example) == GOLDEN[family]
    prompt, answer = made.prompt(row(*turns, images=pictures(4)))
    assert answer == "Yes."
    ids = prompt.fields["input_ids"]
    assert torch.equal(ids, example.fields["input_ids"][: len(ids)])
    whole = re.sub("[«»]", "", GOLDEN[family])
    space = "" if family == "gemma3" else " "
    assert text_of(made, prompt) == whole[: whole.index(f"{space}Yes.")]


PUBLISHED = {
    "smolvlm": "<|im_start|>User:<image>What is it?<end_of_utterance>\nAssistant: A cat."
    "<end_of_utterance>\nUser: Sure?<end_of_utterance>\nAssistant: Yes.<end_of_utterance>\n",
    "gemma3": "<bos><start_of_turn>user\n<start_of_image>What is it?<end_of_turn>\n"
    "<start_of_turn>model\nA cat.<end_of_turn>\n<start_of_turn>user\nSure?<end_of_turn>\n"
    "<start_of_turn>model\nYes.<end_of_turn>\n",
}
PUBLISHED["idefics3"] = PUBLISHED["smolvlm"].replace("<|im_start|>", "<|begin_of_text|>")


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_string_of_the_template(family):
    processor = transformers.AutoProcessor.from_pretrained(tiny(family))
    messages: list[dict] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
    ]
    assert processor.apply_chat_template(messages) == PUBLISHED[family]
    assert renderer(family).template.render(CAT) == PUBLISHED[family]


@pytest.mark.parametrize("turns", [(user("a"), user("b")), (turn("assistant", "a"), user("b"))])
def test_turns_that_do_not_alternate_are_refused_by_gemma(turns):
    with pytest.raises(RowError, match="must take turns") as caught:
        renderer("gemma3").example(row(user("q"), assistant("r"), *turns, assistant("c")))
    assert caught.value.reason == "template"


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_are_refused(family):
    tools = ({"type": "function", "function": {"name": "look"}},)
    with pytest.raises(RowError, match="no tools"):
        renderer(family).example(row(*CAT, images=pictures(1), tools=tools))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_an_image_in_an_answer_carries_loss(family):
    made = renderer(family)
    example = made.example(
        row(user("Draw."), assistant("Here:", 0, "done."), images=pictures(1, 1))
    )
    end = made.template.end_of_turn
    space = "" if family == "gemma3" else " "
    assert runs(made, example) == [space + "Here:", f"done.{end}"]
    first = made.example(row(user("Draw."), assistant(0, "done."), images=pictures(1)))
    assert runs(made, first) == [f"done.{end}"]


# -- typed control tokens ------------------------------------------------------------------------

TYPED = [
    *("<image>", "<start_of_image>", "<image_soft_token>", "<row_1_col_1>", "<row_6_col_6>"),
    *("<global-img>", "<fake_token_around_image>", "<end_of_utterance>", "<end_of_turn>", "<bos>"),
    *("<row_7_col_1>", "<video>", "\n<row_1_col_1>\n"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_typed_control_tokens_stay_text(family):
    """Beside an image too, which is the only one to have control tokens of images."""
    made = renderer(family)
    plain = made.example(row(user(0, "a b"), assistant("a b"), images=pictures(1, 1)))
    for typed in TYPED:
        text = f"a{typed}b"
        example = made.example(row(user(text, 0, text), assistant(text), images=pictures(1, 1)))
        (said,) = runs(made, example)
        assert said.strip() == text + (made.template.end_of_turn or "")
        assert controls(made, example) == controls(made, plain)
        assert marked(made, example).replace("«", "").count(text) == 3


# -- the same ids as the untouched processor's ---------------------------------------------------

LAYOUTS: dict[str, tuple[Turn, ...]] = {
    "first": (user(0, "What is it?"),),
    "behind a line end": (user("See:\n\n", 0, "\n\nalike?"),),
    "side by side": (user(0, 1, "What?"),),
    "at the end": (user("What?", 0),),
    "alone": (user(0),),
    "system": (turn("system", "Be brief.\n"), user(0, "\nWhat?")),
    "in later turns": (user("Hi"), assistant("Yes."), user(0, "a\n", 1), assistant("b"), user(2)),
    "in an answer": (user("Hi"), assistant("a\n", 0, "b"), user("c")),
    "none": (user("Hi"),),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("joins", [False, True], ids=["single", "joined"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_what_the_untouched_processor_makes(family, joins, layout):
    """No mark may part what stands round an image, where line ends are one token, as published."""
    path = with_newline_runs(family) if joins else tiny(family)
    plain, made = transformers.AutoProcessor.from_pretrained(path), Renderer(path)
    turns = (*LAYOUTS[layout], assistant("Yes."))
    images = pictures(sum(not hasattr(part, "text") for one in turns for part in one.parts))
    example = made.example(row(*turns, images=images))
    wanted = plain(
        text=[made.template.render(turns)],
        images=[[image.value for image in images]] if images else None,
        add_special_tokens=False,
        return_tensors="pt",
    )
    got = Batch.of([example]).pad(0)
    assert set(got) - set(TRAINER_KEYS) == set(wanted)
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


def test_a_line_end_before_an_image_is_one_token_with_what_gemma_writes_there():
    """The case that marks at the image itself would part, seen here."""
    made = Renderer(with_newline_runs("gemma3"))
    example = made.example(row(*CAT, images=pictures(1)))
    ids = example.fields["input_ids"].tolist()
    vocabulary = made.tokenizer.get_vocab()
    at = ids.index(vocabulary["<start_of_image>"])
    assert ids[at - 1] == vocabulary["ĊĊĊ"]
    parted = made.tokenizer.encode("user\n", add_special_tokens=False)
    assert ids[2 : 2 + len(parted)] != parted
    assert ids[ids.index(vocabulary["<end_of_image>"]) + 1] == vocabulary["ĊĊ"]


def with_positions_as_text(family: str) -> str:
    """A copy of a tiny checkpoint in which a tile's place is plain text, as in SmolVLM-Instruct."""
    out = scratch() / f"{family}-text-positions"
    shutil.copytree(tiny(family), out)
    file = out / "tokenizer.json"
    data = json.loads(file.read_text())
    for token in data["added_tokens"]:
        if re.fullmatch(r"<row_\d_col_\d>|<global-img>", token["content"]):
            token["content"] = f"<|reserved_{token['id']}|>"
    file.write_text(json.dumps(data))
    return str(out)


def test_a_checkpoint_that_writes_the_places_of_tiles_as_text():
    path = with_positions_as_text("idefics3")
    plain, made = transformers.AutoProcessor.from_pretrained(path), Renderer(path)
    images = pictures(2, start=1)
    turns = user("<row_1_col_1> ", 0, 1, "<global-img>?"), assistant("Yes.")
    example = made.example(row(*turns, images=images))
    wanted = plain(
        text=[made.template.render(turns)],
        images=[[image.value for image in images]],
        add_special_tokens=False,
    )["input_ids"][0]
    assert example.fields["input_ids"].tolist() == wanted
    assert runs(made, example) == [" Yes.<end_of_utterance>"]
    names = {made.tokenizer.convert_ids_to_tokens(token) for token in made.image_ids}
    assert names == {"<image>", "<fake_token_around_image>"}  # and no unknown or end of text


def test_text_at_the_edge_of_an_image_is_refused():
    """Its words could join the text's in one token, and the ids would not be an engine's."""
    made = Renderer(tiny("gemma3"))
    made.processor.full_image_sequence = "The image: " + made.processor.full_image_sequence
    with pytest.raises(RowError, match=r"'The image: <start.*plain text at an end") as caught:
        made.example(row(*CAT, images=pictures(1)))
    assert caught.value.reason == "template"


def test_a_processor_that_writes_something_else_round_an_image_is_refused(monkeypatch):
    plain = transformers.Gemma3Processor.__init__

    @wraps(plain)
    def changed(self, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        self.full_image_sequence = self.full_image_sequence.strip()

    monkeypatch.setattr(transformers.Gemma3Processor, "__init__", changed)
    with pytest.raises(InputError, match=r"processor makes '<start_of_image>.*expected"):
        Renderer(tiny("gemma3"))


def test_gemma_makes_no_crops_whatever_its_image_processor_says():
    """Its processor asks for none, and a sentence about them would stand round the image."""
    made = Renderer(tiny("gemma3"))
    crops = made.processor.image_processor
    crops.do_pan_and_scan, crops.pan_and_scan_min_crop_size = True, 16
    crops.pan_and_scan_max_num_crops, crops.pan_and_scan_min_ratio_to_activate = 4, 1.2
    example = made.example(row(*CAT, images=[noise(140, 56)]))
    assert example.fields["pixel_values"].shape == (1, 3, 56, 56)


# -- tiles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TILED)
@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [((56, 56), 0, 0), ((8, 8), 0, 0), ((112, 56), 1, 2), ((40, 150), 3, 1), ((168, 100), 2, 3)],
)
def test_tiles_by_image_size(family, size, rows, columns):
    made = renderer(family)
    example = made.example(row(*CAT, images=[noise(*size)]))
    tiles = rows * columns + 1
    count = controls(made, example)
    assert example.fields["pixel_values"].shape == (1, tiles, 3, 56, 56)
    assert example.fields["pixel_attention_mask"].shape == (1, tiles, 56, 56)
    assert (count["<image>"], count["<global-img>"]) == (4 * tiles, 1)
    assert count["<fake_token_around_image>"] == tiles + 1
    places = {f"<row_{r + 1}_col_{c + 1}>" for r, c in product(range(rows), range(columns))}
    assert {token for token in count if token.startswith("<row_")} == places


@pytest.mark.parametrize("family", TILED)
@pytest.mark.parametrize("grey", [0, 127, 128, 255])
def test_no_picture_of_one_grey_is_taken_for_padding(family, grey):
    """The model drops tiles of zeros, and 127.5, which is 0 behind the processor, is no grey."""
    images = [ImageRef(PIL.Image.new("RGB", (56, 56), (grey,) * 3)), noise(56, 56)]
    example = renderer(family).example(row(user(0, 1, "a"), assistant("b"), images=images))
    pixels = example.fields["pixel_values"]
    for dtype in (torch.float32, torch.bfloat16):
        assert (pixels[0, 0].to(dtype) != 0).all()
    hf = policy(family).hf
    shown = hf.model.get_image_features(pixels, example.fields["pixel_attention_mask"])
    assert len(shown.pooler_output) == 2


# -- rows together and alone ---------------------------------------------------------------------


def rows_of(family: str) -> list[Example]:
    """Rows with 0, 1, 2 and 3 images of different sizes."""
    made, examples, shown = renderer(family), [], 0
    for count in range(4):
        images = pictures(count, start=shown)
        shown += count
        turns = (
            user(*range(count), f"What is it? {'Really? ' * count}"),
            assistant("A cat. " * count),
        )
        examples.append(made.example(row(*turns, user("Sure?"), assistant("No."), images=images)))
    return examples


@torch.no_grad()
def logprobs(family: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return policy(family, 4)(inputs)


@cache
def alone(family: str) -> torch.Tensor:
    return torch.cat([logprobs(family, Batch.of([one]).pack()) for one in rows_of(family)])


@pytest.mark.parametrize("layout", ["packed", "right", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_together_are_as_rows_alone(family, layout):
    batch = Batch.of(rows_of(family))
    together = (
        batch.pack() if layout == "packed" else batch.pad(renderer(family).pad_id, layout == "left")
    )
    assert (logprobs(family, together) - alone(family)).abs().max() < CLOSE


@cache
def plain_model(family: str) -> Any:
    auto = getattr(transformers, get_family(family).auto_class)
    return auto.from_pretrained(tiny(family)).eval()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_a_row_is_the_models_own(family):
    """By its own `forward(labels=...)`, from what the processor gives and no positions."""
    for one in rows_of(family):
        inputs = Batch.of([one]).pad(0)
        given = {n: v for n, v in inputs.items() if n not in TRAINER_KEYS}
        own = plain_model(family)(**given, labels=inputs["labels"]).loss
        ours = -policy(family)(Batch.of([one]).pack()).mean()
        assert ours.item() == pytest.approx(own.item(), abs=1e-5)


# -- pictures are seen ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_and_their_order_change_log_probs(family):
    made = renderer(family)
    turns = user(0, " or ", 1, ": which?"), assistant("The first.")
    one, two = noise(56, 56, seed=1), noise(56, 56, seed=2)
    example = made.example(row(*turns, images=[one, two]))
    swapped = made.example(row(*turns, images=[two, one]))
    before = logprobs(family, Batch.of([example]).pack())
    assert (logprobs(family, Batch.of([swapped]).pack()) - before).abs().max() > 0.01
    dark = made.example(row(*turns, images=[one, two]))
    dark.fields["pixel_values"] *= 1e-6  # as good as 0, which is padding to some
    assert (logprobs(family, Batch.of([dark]).pack()) - before).abs().max() > 0.01


def test_image_tokens_of_gemma_see_each_other_both_ways():
    """The processor's key that says which they are reaches the model; without it, all is causal."""
    inputs = Batch.of(rows_of("gemma3")).pack()
    soft = renderer("gemma3").tokenizer.convert_tokens_to_ids("<image_soft_token>")
    assert torch.equal(inputs["token_type_ids"] == 1, inputs["input_ids"] == soft)
    inputs["token_type_ids"] = torch.zeros_like(inputs["token_type_ids"])
    gap = (logprobs("gemma3", inputs) - alone("gemma3")).abs()
    of_text_row = rows_of("gemma3")[0].supervised
    assert gap[:of_text_row].max() < CLOSE
    assert gap[of_text_row:].max() > 0.01


# -- the model as a trainer builds it ------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_built_model_has_the_buffers_of_a_loaded_one(family):
    """Numbers of positions, rotary frequencies and scales are in no checkpoint."""
    engine, _ = engine_for(tiny(family), parallel_module.start(shard=False))
    built = dict(engine.policy.hf.named_buffers())
    loaded = dict(plain_model(family).named_buffers())
    assert built.keys() == loaded.keys()
    assert len(built) >= {"gemma3": 6}.get(family, 2)
    for name, value in loaded.items():
        assert torch.equal(built[name], value), name


def test_a_pooling_head_is_never_trained():
    """A config may have one, published ones do not; everything else has a gradient."""
    made = Renderer(tiny("gemma3"))
    made.config.vision_config.vision_use_head = True
    hf = transformers.AutoModelForImageTextToText.from_config(made.config)
    finish(hf)
    Policy(hf, made.family, made.dummy())(
        Batch.of([made.example(row(*CAT, images=pictures(1)))]).pack()
    ).sum().backward()
    without = {name for name, one in hf.named_parameters() if one.grad is None}
    assert without == {
        n for n, _ in hf.named_parameters() if n.startswith("model.vision_tower.head.")
    }
    assert without
    freeze(hf, made.family, set())
    assert without == {name for name, one in hf.named_parameters() if not one.requires_grad}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_gradient(family):
    made = policy(family)
    made.zero_grad()
    made(Batch.of(rows_of(family)).pack()).sum().backward()
    without = [n for n, one in made.hf.named_parameters() if one.grad is None or not one.grad.any()]
    made.zero_grad()
    assert without == []


def test_capped_logits():
    """Values and gradients, against capped full logits; a policy reads the cap from the config."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 50, bias=False), torch.randn(20, 8)
    targets = torch.randint(50, (20,))
    found, wanted = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    ours = token_logprobs(10 * found, head, targets, softcap=3.0)
    logits = 3 * torch.tanh(head(10 * wanted) / 3)
    own = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert (ours - own).abs().max() < CLOSE
    assert (ours - token_logprobs(10 * found, head, targets)).abs().max() > 0.1
    ours.sum().backward()
    own.sum().backward()
    assert (found.grad - wanted.grad).abs().max() < 1e-4


@torch.no_grad()
def test_a_policy_caps_logits_as_its_config_says():
    made = renderer("gemma3")
    hf = transformers.AutoModelForImageTextToText.from_pretrained(tiny("gemma3")).eval()
    example = rows_of("gemma3")[1]
    inputs = Batch.of([example]).pad(0)
    given = {n: v for n, v in inputs.items() if n not in TRAINER_KEYS}
    logits = 2 * torch.tanh(hf(**given).logits[0] / 2)
    hf.config.get_text_config().final_logit_softcapping = 2.0
    places = (inputs["labels"][0] != IGNORE).nonzero()[:, 0]
    wanted = logits.log_softmax(-1)[places - 1, inputs["labels"][0][places]]
    found = Policy(hf, made.family, made.dummy())(Batch.of([example]).pack())
    assert (found - wanted).abs().max() < CLOSE
