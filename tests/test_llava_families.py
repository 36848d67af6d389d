"""LLaVA 1.5, LLaVA-NeXT, LLaVA-OneVision and InternVL: texts by hand, crops, backbones.

In the strings, «» stands round what carries loss, and [n] for an image of n tokens.
"""

from __future__ import annotations

import re
import shutil
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.ranks.cases import engine_for
from tests.test_corpus_render import CASES, render
from tests.tiny_models import (
    CAT,
    _pieces,
    assistant,
    controls,
    noise,
    policy,
    renderer,
    row,
    runs,
    scratch,
    tiny,
    turn,
    user,
)
from vireo import parallel as parallel_module
from vireo.data.conversation import Conversation, Image, Turn
from vireo.data.ragged import BASE_KEYS, Batch, Example
from vireo.data.render import Renderer
from vireo.errors import InputError, RowError
from vireo.families import FAMILIES, get_family
from vireo.families.tiny import build
from vireo.models.build import empty_policy
from vireo.models.names import check_layers, named_parameters, unused_paths

LLAVAS = ["llava", "llava_next", "llava_onevision"]
MINE = [*LLAVAS, "internvl"]
CLOSE = 1e-5  # float32 on a CPU


def shown(made: Renderer, example: Example) -> str:
    """The text of an example, its supervised runs in «», each run of image tokens as [n]."""
    text = "".join(f"«{text}»" if loss else text for text, loss in _pieces(made, example))
    image = re.compile(r"<img>((?:<IMG_CONTEXT>)+)</img>|((?:<image>)+)")
    return image.sub(lambda run: f"[{(run[1] or run[2]).count('<')}]", text)


# -- texts and what of them carries loss ---------------------------------------------------------

# A row of one image, and one with a system turn, two images in a question and one in another.
GOLDEN = {
    "llava": (
        "<s>USER: [4]\nWhat is it? ASSISTANT:« A cat. »USER: Sure? ASSISTANT:« Yes. </s>»",
        "<s>Be brief. USER: [4]\n[4]\nAlike? ASSISTANT:« No. »"
        "USER: [4]\nAnd   this? ASSISTANT:« Yes. </s>»",
    ),
    "llava_next": (
        "<s>[INST] [10]\nWhat is it? [/INST]« A cat.</s>» [INST] Sure? [/INST]« Yes.</s>» ",
        "<s><<SYS>>\nBe brief.\n<</SYS>>\n\n[INST] [10]\n[16]\nAlike? [/INST]« No.</s>» "
        "[INST] [24]\nAnd  this? [/INST]« Yes.</s>» ",
    ),
    "llava_onevision": (  # two images side by side, of 5 tokens each, are one run
        "<|im_start|>user [10]\nWhat is it?<|im_end|><|im_start|>assistant\n«A cat.<|im_end|>»"
        "<|im_start|>user \nSure?<|im_end|><|im_start|>assistant\n«Yes.<|im_end|>»",
        "<|im_start|>system \nBe brief.<|im_end|><|im_start|>user [10]\nAlike?<|im_end|>"
        "<|im_start|>assistant\n«No.<|im_end|>»<|im_start|>user [5]\nAnd \n this?<|im_end|>"
        "<|im_start|>assistant\n«Yes.<|im_end|>»",
    ),
    "internvl": (
        "<|im_start|>user\n[4]\nWhat is it?<|im_end|>\n<|im_start|>assistant\n«A cat.<|im_end|>»\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n«Yes.<|im_end|>»\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n[4]\n[12]\nAlike?<|im_end|>\n"
        "<|im_start|>assistant\n«No.<|im_end|>»\n<|im_start|>user\nAnd [20]\n this?<|im_end|>\n"
        "<|im_start|>assistant\n«Yes.<|im_end|>»\n",
    ),
}
LONG = (
    turn("system", "Be brief."),
    user(0, 1, "Alike?"),
    assistant("No."),
    user("And ", 2, " this?"),
    assistant("Yes."),
)
ALL = (CAT, LONG, (user("Hi?"), assistant("Ho.\n\n"), user("Hm?"), assistant("\nHo.")))


def pictures(count: int) -> list[Any]:
    return [noise(*[(56, 56), (56, 112), (112, 112)][i % 3], seed=i) for i in range(count)]


def with_pictures(turns: tuple[Turn, ...]) -> Conversation:
    count = sum(isinstance(part, Image) for one in turns for part in one.parts)
    return row(*turns, images=pictures(count))


@pytest.mark.parametrize("family", MINE)
def test_golden_strings_and_what_carries_loss(family):
    made = renderer(family)
    for turns, wanted in zip((CAT, LONG), GOLDEN[family]):
        assert shown(made, made.example(with_pictures(turns))) == wanted


@pytest.mark.parametrize("family", MINE)
@pytest.mark.parametrize("turns", ALL)
def test_a_prompt_is_the_row_up_to_its_last_answer(family, turns):
    made, conversation = renderer(family), with_pictures(turns)
    prompt, answer = made.prompt(conversation)
    whole = made.example(conversation).fields["input_ids"]
    assert torch.equal(prompt.fields["input_ids"], whole[: len(prompt)])
    assert (answer, prompt.supervised) == (turns[-1].text, 0)


def plain(family: str, conversation: Conversation, prompt: bool) -> Any:
    """What plain transformers makes of a row, or of a prompt: its text, then one processor call."""
    processor = transformers.AutoProcessor.from_pretrained(tiny(family))
    turns = conversation.turns[:-1] if prompt else conversation.turns
    messages = [
        {
            "role": one.role,
            "content": [
                {"type": "image"}
                if isinstance(part, Image)
                else {"type": "text", "text": part.text}
                for part in one.parts
            ],
        }
        for one in turns
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=prompt)
    if family == "llava" and not prompt:
        text += "</s>"  # or the model would never learn to stop
    if family == "llava_onevision":  # one opening of answers, that of prompts
        text = text.replace("assistant \n", "assistant\n")
    images = [[ref.value for ref in conversation.images]] if conversation.images else None
    return processor(text=[text], images=images, return_tensors="pt")


@pytest.mark.parametrize("prompt", [False, True], ids=["row", "prompt"])
@pytest.mark.parametrize("family", MINE)
@pytest.mark.parametrize("turns", ALL)
def test_every_key_is_what_the_plain_processor_makes_of_the_text(family, turns, prompt):
    """With the token that starts a text, which these tokenizers write and no template does."""
    made, conversation = renderer(family), with_pictures(turns)
    example = made.prompt(conversation)[0] if prompt else made.example(conversation)
    wanted = dict(plain(family, conversation, prompt))
    assert wanted.pop("attention_mask").all()
    assert torch.equal(wanted.pop("input_ids")[0], example.fields["input_ids"])
    assert set(wanted) == set(example.fields) - set(BASE_KEYS)
    assert set(wanted) == (set(FAMILIES[family].keys) if conversation.images else set())
    for name, value in wanted.items():
        assert torch.equal(value, example.fields[name]), name


@pytest.mark.parametrize("family", MINE)
def test_typed_control_tokens_stay_text_beside_an_image(family):
    made = renderer(family)
    bare = controls(made, made.example(row(*beside("a b"), images=pictures(1))))
    end = {"llava": " </s>", "llava_next": "</s>"}.get(family, "<|im_end|>")
    for typed in made.controls:
        text = f"a {typed}{typed} b"
        example = made.example(row(*beside(text), images=pictures(1)))
        (answer,) = runs(made, example)
        assert answer.removeprefix(" ") == text + end
        assert controls(made, example) == bare
        assert made.tokenizer.decode(example.fields["input_ids"]).count(text) == 3


def beside(text: str) -> tuple[Turn, ...]:
    return turn("system", text), user(0, text), assistant(text)


# Rows that a family's published template cannot write, or that it writes otherwise.
NO_TOOLS = ["chats/tool_calls.json"]
NO_TOOL_TURNS = [*NO_TOOLS, "chats/role_tool.json", "chats/role_function.json"]
REFUSED = {
    "llava": NO_TOOLS,
    "llava_next": NO_TOOL_TURNS,
    "llava_onevision": [*NO_TOOLS, "chats/image_in_assistant.json"],
    "internvl": NO_TOOLS,
}
# Only the processors of the Qwen families refuse so thin a picture.
THIN, MOVED = "chats/image_thin.json", "chats/image_in_assistant.json"
ENDS = {"llava": " ", "llava_next": "</s>"}


@pytest.mark.parametrize("family", MINE)
def test_chat_files_of_the_corpus(family):
    made = renderer(family)
    opening, end = " " if family in ENDS else "", ENDS.get(family, "<|im_end|>")
    seen = set()
    for case in CASES:
        got = render(made, case)
        for wanted in case["expect"]["rows"]:
            result, accepted = got[wanted["row"]], wanted["outcome"] == "accept"
            if case["file"] in (*REFUSED[family], THIN) and wanted["row"] == 1:
                assert isinstance(result, RowError) == accepted
                seen.add(case["file"])
                continue
            assert isinstance(result, Example) == accepted, result
            if isinstance(result, RowError):
                assert result.reason == wanted["reason"]
            elif wanted["assistant_texts"] is not None and case["file"] != MOVED:
                texts = [opening + one.replace("⟨EOT⟩", end) for one in wanted["assistant_texts"]]
                texts[-1] += "</s>" if family == "llava" else ""
                assert runs(made, result) == texts
    assert seen == {*REFUSED[family], THIN}


# -- pictures into crops and tokens --------------------------------------------------------------

# Width and height; then crops (tiles) with the whole picture, and tokens, of each family.
CROPS: dict[tuple[int, int], dict[str, tuple[int, int]]] = {
    (56, 56): {"llava_next": (3, 10), "llava_onevision": (2, 10), "internvl": (1, 4)},
    (8, 8): {"llava_next": (3, 10), "llava_onevision": (2, 10), "internvl": (1, 4)},
    (56, 112): {"llava_next": (3, 16), "llava_onevision": (3, 16), "internvl": (3, 12)},
    (168, 56): {"llava_next": (4, 18), "llava_onevision": (4, 18), "internvl": (4, 16)},
    (300, 300): {"llava_next": (5, 24), "llava_onevision": (10, 24), "internvl": (5, 20)},
    (1, 100): {"llava_next": (3, 8), "llava_onevision": (3, 8), "internvl": (5, 20)},
}


@pytest.mark.parametrize("size", CROPS)
@pytest.mark.parametrize("family", MINE)
def test_crops_and_tokens_by_image_size(family, size):
    made = renderer(family)
    example = made.example(row(*CAT, images=[noise(*size)]))
    crops, tokens = CROPS[size].get(family, (1, 4))
    *_, found, _, _, _ = example.fields["pixel_values"].shape
    assert found == crops
    assert f"[{tokens}]" in shown(made, example)
    images = {n: v for n, v in example.fields.items() if n not in BASE_KEYS}
    features = policy(family).hf.model.get_image_features(**images).pooler_output
    assert sum(len(one) for one in features) == tokens


def test_only_an_image_alone_in_its_row_has_crops_in_onevision():
    made = renderer("llava_onevision")
    turns = user(0, 1, "Which?"), assistant("Both.")
    example = made.example(row(*turns, images=[noise(56, 112), noise(112, 56)]))
    assert example.fields["batch_num_images"].tolist() == [2]
    assert example.fields["pixel_values"].shape == (2, 1, 3, 56, 56)
    alone = made.example(row(*CAT, images=[noise(56, 112)]))
    both = Batch.of([alone, example]).pack()
    assert both["batch_num_images"].tolist() == [1, 2]
    assert both["pixel_values"].shape == (3, 3, 3, 56, 56)
    assert both["image_sizes"].tolist() == [[112, 56], [112, 56], [56, 112]]


@pytest.mark.parametrize("family", MINE)
def test_no_pixels_no_sight(family):
    """Blank pixels in a picture's place change what is said of it."""
    example = renderer(family).example(with_pictures(CAT))
    inputs = Batch.of([example]).pack()
    with torch.no_grad():
        seen = policy(family)(inputs)
        inputs["pixel_values"] = torch.zeros_like(inputs["pixel_values"])
        assert (policy(family)(inputs) - seen).abs().max() > 0.01


# -- backbones -----------------------------------------------------------------------------------

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SIGLIP = {"vision": {"model_type": "siglip_vision_model"}}
# family, its fields, then its decoder layer and that of its tower: those of published checkpoints.
BACKBONES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "llava, Llama": ("llava", {}, "LlamaDecoderLayer", "CLIPEncoderLayer"),
    "llava, Mistral": (
        "llava",
        {"model_type": "mistral"},
        "MistralDecoderLayer",
        "CLIPEncoderLayer",
    ),
    "llava, Qwen2, SigLIP": (
        "llava",
        {"model_type": "qwen2", **SIGLIP},
        "Qwen2DecoderLayer",
        "SiglipEncoderLayer",
    ),
    "llava, Qwen3": ("llava", {"model_type": "qwen3"}, "Qwen3DecoderLayer", "CLIPEncoderLayer"),
    "llava_next, Mistral": ("llava_next", {}, "MistralDecoderLayer", "CLIPEncoderLayer"),
    "llava_next, Llama": (
        "llava_next",
        {"model_type": "llama"},
        "LlamaDecoderLayer",
        "CLIPEncoderLayer",
    ),
    "llava_next, Qwen2": (
        "llava_next",
        {"model_type": "qwen2"},
        "Qwen2DecoderLayer",
        "CLIPEncoderLayer",
    ),
    "llava_next, Qwen3": (
        "llava_next",
        {"model_type": "qwen3"},
        "Qwen3DecoderLayer",
        "CLIPEncoderLayer",
    ),
    "llava_onevision": ("llava_onevision", {}, "Qwen2DecoderLayer", "SiglipEncoderLayer"),
    "internvl, Qwen2": ("internvl", {}, "Qwen2DecoderLayer", "InternVLVisionLayer"),
    "internvl, Qwen3": (
        "internvl",
        {"model_type": "qwen3"},
        "Qwen3DecoderLayer",
        "InternVLVisionLayer",
    ),
    "internvl, Qwen3-MoE": (
        "internvl",
        {"model_type": "qwen3_moe", **EXPERTS},
        "Qwen3MoeDecoderLayer",
        "InternVLVisionLayer",
    ),
    "internvl, Llama": (
        "internvl",
        {"model_type": "llama"},
        "LlamaDecoderLayer",
        "InternVLVisionLayer",
    ),
}


def test_a_decoder_that_is_not_known_is_refused() -> None:
    """Its layers would be neither sharded nor recomputed, and their attention may be another."""
    config = transformers.AutoConfig.from_pretrained(tiny("llava"))
    sizes = {n: getattr(config.text_config, n) for n in ("hidden_size", "vocab_size")}
    config.text_config = transformers.Phi3Config(**sizes, num_hidden_layers=1, pad_token_id=0)
    with pytest.raises(InputError, match=r"LlamaDecoderLayer, .*, but Phi3DecoderLayer: take"):
        check_layers(empty_policy(config, FAMILIES["llava"]).hf, FAMILIES["llava"])


@cache
def engine_of(backbone: str) -> tuple[Any, Renderer]:
    family, fields, _, _ = BACKBONES[backbone]
    if not fields:
        return engine_for(tiny(family), parallel_module.start(shard=False))
    out = scratch() / re.sub(r"\W+", "-", backbone)
    build(family, out, size="test", **fields)
    return engine_for(str(out), parallel_module.start(shard=False))


def rows_of(made: Renderer) -> list[Example]:
    """Rows with 0, 1, 2 and 3 images of different sizes."""
    sizes = [[], [(56, 56)], [(84, 28), (56, 112)], [(28, 28), (140, 56), (56, 84)]]
    return [
        made.example(
            row(
                user(*range(len(shapes)), f"What is in the image? {'Really? ' * i}"),
                assistant(f"It is a cat. {i}"),
                images=[noise(w, h, seed=10 * i + k) for k, (w, h) in enumerate(shapes)],
            )
        )
        for i, shapes in enumerate(sizes)
    ]


def plain_inputs(example: Example) -> dict[str, torch.Tensor]:
    """What plain transformers takes: no positions, no mask for a row alone, and labels."""
    token = {n: example.fields[n][None] for n in ("input_ids", "labels")}
    return token | {n: v for n, v in example.fields.items() if n not in BASE_KEYS}


def test_the_entries_name_the_layers_of_the_backbones():
    for family in MINE:
        entry = get_family(family)
        mine = [one for one in BACKBONES.values() if one[0] == family]
        assert {one[2] for one in mine} == set(entry.decoder_layers)
        assert {one[3] for one in mine} == set(entry.vision_layers)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_layers_of_a_backbone_are_the_models(backbone):
    model = engine_of(backbone)[0].policy.hf.model
    language, tower = model.language_model.layers, model.vision_tower.encoder
    layers = tower.layer if backbone.startswith("internvl") else tower.layers
    assert {type(one).__name__ for one in language} == {BACKBONES[backbone][2]}
    assert {type(one).__name__ for one in layers} == {BACKBONES[backbone][3]}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_rows_packed_and_padded_have_the_log_probs_and_the_loss_of_rows_alone(backbone):
    engine, made = engine_of(backbone)
    rows = rows_of(made)
    own = transformers.AutoModelForImageTextToText.from_pretrained(made.model_path).eval()
    with torch.no_grad():
        alone = [engine.policy(Batch.of([one]).pack()) for one in rows]
        packed = engine.policy(Batch.of(rows).pack())
        padded = [engine.policy(Batch.of(rows).pad(made.pad_id, left)) for left in (False, True)]
        for one, logprobs in zip(rows, alone):
            loss = own(**plain_inputs(one)).loss.item()
            assert -logprobs.mean().item() == pytest.approx(loss, abs=CLOSE)
    for together in (packed, *padded):
        assert (together - torch.cat(alone)).abs().max() < CLOSE


@pytest.mark.parametrize("backbone", BACKBONES)
def test_everything_that_is_not_unused_gets_a_gradient(backbone):
    """From images; and from text alone, a zero, or ranks would not agree on what they reduce."""
    engine, made = engine_of(backbone)
    rows, hf = rows_of(made), engine.policy.hf
    unused = unused_paths(hf, made.family)
    for batch in (rows, rows[:1]):
        engine.optimizer.zero_grad()
        engine.policy(Batch.of(batch).pack()).sum().backward()
        for name, parameter in named_parameters(hf):
            assert parameter.requires_grad != name.startswith(unused), name
            assert (parameter.grad is not None) == parameter.requires_grad, name
            if batch is rows and parameter.grad is not None:
                assert parameter.grad.abs().max() > 0, name
    engine.optimizer.zero_grad()


# -- layers of the tower that are not looked at --------------------------------------------------


@pytest.mark.parametrize(
    ("shown_layer", "unused"),
    [(-1, []), (-2, [3]), (-4, [1, 2, 3]), (4, []), (1, [1, 2, 3]), ([-3, -2], [3]), ([1, 4], [])],
)
def test_layers_above_the_one_shown_are_unused(shown_layer, unused):
    model = nn.ModuleDict({"tower": nn.ModuleList(nn.Linear(1, 1) for _ in range(4))})
    model.config = SimpleNamespace(vision_feature_layer=shown_layer)
    family = SimpleNamespace(unused=("summary",), tower_layers="tower")
    assert unused_paths(model, family) == ("summary.", *(f"tower.{i}." for i in unused))


@pytest.mark.parametrize("layer", [-3, -2, 1, [1, 2]])
def test_another_layer_shown_leaves_other_layers_without_gradients(layer, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny("llava"), folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.vision_feature_layer = layer
    model = transformers.AutoModelForImageTextToText.from_config(config)
    example = renderer("llava").example(with_pictures(CAT))
    model(**plain_inputs(example)).loss.backward()
    unused = unused_paths(model, get_family("llava"))
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith(unused), name


@pytest.mark.parametrize("family", MINE)
def test_buffers_that_no_checkpoint_holds_are_those_of_a_loaded_model(family):
    """Those of the tower, too, which is a model of another family."""
    engine, _ = engine_for(tiny(family), parallel_module.start(shard=False))
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tiny(family))
    wanted = dict(loaded.named_buffers())
    assert family == "internvl" or any("vision_tower" in name for name in wanted)
    found = dict(engine.policy.hf.named_buffers())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
