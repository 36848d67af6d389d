"""Tiny checkpoints load in plain transformers, speak their chat to the letter, and can learn."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.tiny_models import FAMILIES
from vireo.families import get_family
from vireo.families.tiny import build
from vireo.families.tiny.templates import chatml, llama
from vireo.families.tiny.tokenizer import EMBEDDING_SIZE, VOCAB_SIZE, make_tokenizer
from vireo.families.tiny.tokenizer import LLAMA as LLAMA_TOKENS
from vireo.models.names import unused_paths

torch.set_num_threads(1)

VISION = sorted(name for name in FAMILIES if FAMILIES[name].has_vision)
QWEN = ["qwen2_5_vl", "qwen2_vl"]
LLAMA = ["llama", "mllama"]
ENDS = {name: ("<|eot_id|>", "<|end_of_text|>") for name in LLAMA} | {  # of a turn, of a text
    "gemma3": ("<end_of_turn>", "<eos>"),
    "idefics3": ("<end_of_utterance>", "<|end_of_text|>"),
    "llava": ("</s>", "<pad>"),
    "llava_next": ("</s>", "<pad>"),
    "smolvlm": ("<end_of_utterance>", "<|im_end|>"),
}
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TURNS = (
    "<|im_start|>user\n{image}What is it?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n"
    "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
)
CAT = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a family's tiny checkpoint, built once."""
    built = {}

    def folder(family: str) -> Path:
        if family not in built:
            built[family] = build(family, tmp_path_factory.mktemp("tiny") / family, size="test")
        return built[family]

    return folder


def load(folder: Path, family: str):
    """(model, processor or tokenizer), as anyone would load them."""
    entry = get_family(family)
    model = getattr(transformers, entry.auto_class).from_pretrained(folder)
    loader = transformers.AutoProcessor if entry.has_vision else transformers.AutoTokenizer
    return model, loader.from_pretrained(folder)


def encode(processor, family: str):
    """Model inputs of one prompt, with a picture where the family takes one."""
    if not get_family(family).has_vision:
        return processor("What is it?", return_tensors="pt")
    text = processor.apply_chat_template(CAT[:1], add_generation_prompt=True)
    image = Image.new("RGB", (56, 56), "orange")
    return processor(text=[text], images=[image], return_tensors="pt", add_special_tokens=False)


def banned(processor, family: str) -> list[int]:
    tokens = list(get_family(family).image_tokens)
    return processor.tokenizer.convert_tokens_to_ids(tokens) if tokens else []


# -- chat templates


@pytest.mark.parametrize("family", QWEN)
def test_golden_string_with_an_image(tiny, family):
    processor = transformers.AutoProcessor.from_pretrained(tiny(family))
    assert processor.apply_chat_template(CAT) == SYSTEM + TURNS.format(image=IMAGE)
    prompt = processor.apply_chat_template(CAT[:1], add_generation_prompt=True)
    assert processor.apply_chat_template(CAT).startswith(prompt)
    assert processor.tokenizer.apply_chat_template(CAT, tokenize=False) == SYSTEM + TURNS.format(
        image=IMAGE
    )


def render(messages, *, vision=True, **options):
    system = "You are a helpful assistant." if vision else ""
    tokenizer = make_tokenizer(chatml(default_system=system, vision=vision), 100)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_golden_string_of_the_text_family(tiny):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny("qwen3"))
    messages = [{"role": "user", "content": "What is it?"}, *CAT[1:]]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == TURNS.format(image="")


LLAMA_TURNS = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{image}What is it?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA cat.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
)


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("mllama", LLAMA_TURNS.format(image="<|image|>")),
        ("minicpmv4_6", TURNS.format(image="<|image_pad|>")),
    ],
)
def test_golden_strings_without_a_default_system_turn(tiny, family, wanted):
    processor = transformers.AutoProcessor.from_pretrained(tiny(family))
    assert processor.apply_chat_template(CAT) == wanted
    assert processor.tokenizer.apply_chat_template(CAT, tokenize=False) == wanted


def test_golden_string_of_llama(tiny):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny("llama"))
    messages = [{"role": "user", "content": "What is it?"}, *CAT[1:]]
    wanted = LLAMA_TURNS.format(image="")
    assert tokenizer.apply_chat_template(messages, tokenize=False) == wanted
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert wanted.startswith(prompt)
    assert prompt.endswith("assistant<|end_header_id|>\n\n")


@pytest.mark.parametrize("family", LLAMA)
def test_the_llama_tokenizers_begin_a_text_as_published(tiny, family):
    """A trap: text from a chat template has its beginning, and must not get a second one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny(family))
    start = tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    assert tokenizer.encode("a")[0] == start == tokenizer.bos_token_id
    ids = tokenizer.apply_chat_template(CAT[2:], return_dict=True)["input_ids"]
    assert ids.count(start) == 1


def test_a_given_system_turn_replaces_the_default():
    messages = [{"role": "system", "content": "Be brief."}, *CAT]
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert render(messages) == system + TURNS.format(image=IMAGE)


def test_parts_keep_their_order():
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    turn = f"<|im_start|>user\na{IMAGE}b<|im_end|>\n"
    assert render([{"role": "user", "content": parts}]) == SYSTEM + turn
    video = [{"role": "user", "content": [{"type": "video"}]}]
    assert "<|vision_start|><|video_pad|><|vision_end|>" in render(video)


def test_a_part_the_model_cannot_take_is_refused():
    with pytest.raises(Exception, match="no content part of type image"):
        render(CAT, vision=False)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS = [
    {"role": "user", "content": "1+2 and 3+4?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
            {"function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}},
        ],
    },
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": [{"type": "text", "text": "7"}]},
    {"role": "assistant", "content": "3 and 7."},
]


def test_tool_calls_and_results_are_hermes_style():
    expected = (
        "<|im_start|>user\n1+2 and 3+4?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n"
        "<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n3 and 7.<|im_end|>\n"
    )
    assert render(CALLS) == SYSTEM + expected
    assert render(CALLS, vision=False) == expected


@pytest.mark.parametrize("vision", [True, False])
@pytest.mark.parametrize("given", [[], [{"role": "system", "content": "Be brief."}]])
def test_tools_are_listed_in_the_one_system_turn(vision, given):
    text = render([*given, *CALLS], vision=vision, tools=TOOLS)
    system, _, rest = text.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\n")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in system
    assert ("Be brief.\n\n" in system) == bool(given)
    assert "<|im_start|>system" not in rest


def llama_render(messages, **options):
    tokenizer = make_tokenizer(llama(image="<|image|>"), 100, LLAMA_TOKENS)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_a_llama_tool_call_is_bare_json_and_its_result_an_ipython_turn():
    call = [CALLS[0], {**CALLS[1], "tool_calls": CALLS[1]["tool_calls"][:1]}, CALLS[2]]
    assert llama_render(call).endswith(
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>'
        "<|start_header_id|>ipython<|end_header_id|>\n\n3<|eot_id|>"
    )
    with pytest.raises(Exception, match="one tool call a turn"):
        llama_render(CALLS)


@pytest.mark.parametrize("given", [[], [{"role": "system", "content": "Be brief."}]])
def test_llama_tools_are_listed_in_the_one_system_turn(given):
    text = llama_render([*given, CALLS[0]], tools=TOOLS)
    system, _, rest = text.partition("<|eot_id|>")
    assert system.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n")
    assert f"\n{json.dumps(TOOLS[0])}\n" in system
    assert ("\n\nBe brief.\n\n" in system) == bool(given)
    assert rest == "<|start_header_id|>user<|end_header_id|>\n\n1+2 and 3+4?<|eot_id|>"


# -- tokenizer


TOKENIZER = make_tokenizer(chatml(), 100)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_survives_the_tokenizer(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text
    assert all(i < VOCAB_SIZE for i in ids)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_loaded_tokenizer_does_not_normalise(tiny, family):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny(family))
    text = "e\u0301 \ufb01 \u00e9  a\r\n\t\U0001f431 12 don't"  # NFC would join e and the accent
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer) == VOCAB_SIZE <= EMBEDDING_SIZE
    ends = ENDS.get(family, ("<|im_end|>", "<|endoftext|>"))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ends
    assert len(tokenizer.encode("123", add_special_tokens=False)) == 3  # one digit a token


# -- models


@pytest.mark.parametrize(
    ("family", "tie"),
    [(f, t) for f in sorted(FAMILIES) for t in (True, False) if not (t and f == "mllama")],
)
def test_learns_generates_and_reloads(family, tie, tmp_path):
    folder = build(family, tmp_path / "a", size="test", tie_word_embeddings=tie)
    model, processor = load(folder, family)
    assert model.config.dtype == torch.float32
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embeddings is head) == tie
    wanted = (VOCAB_SIZE - 1 + 8, VOCAB_SIZE - 1) if family == "mllama" else 2 * (EMBEDDING_SIZE,)
    assert (embeddings.shape[0], head.shape[0]) == wanted

    inputs = encode(processor, family)
    unseen = torch.isin(inputs["input_ids"], torch.tensor(banned(processor, family)))
    labels = inputs["input_ids"].masked_fill(unseen, -100)
    model(**inputs, labels=labels).loss.backward()
    unused = unused_paths(model, get_family(family))
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith(unused), name
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    length = inputs["input_ids"].shape[1]
    text = model.generate(
        **inputs, max_new_tokens=4, suppress_tokens=banned(processor, family) or None
    )
    assert text.shape[1] > length

    model.save_pretrained(tmp_path / "b")
    processor.save_pretrained(tmp_path / "b")
    again, processor = load(tmp_path / "b", family)
    inputs = encode(processor, family)
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, again.eval()(**inputs).logits)


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize(
    ("size", "tokens"), [((56, 56), 4), ((28, 28), 1), ((5, 5), 1), ((5, 90), 5)]
)
def test_image_tokens_by_image_size(tiny, family, size, tokens):
    processor = transformers.AutoProcessor.from_pretrained(tiny(family))
    image = Image.new("RGB", size, "red")
    out = processor(text=[IMAGE], images=[image], return_tensors="pt")
    assert out["pixel_values"].shape[0] == 4 * tokens
    assert out["mm_token_type_ids"].sum() == tokens


@pytest.mark.parametrize(
    ("size", "tiles"), [((56, 56), 1), ((8, 8), 1), ((90, 40), 2), ((60, 120), 2), ((200, 200), 4)]
)
def test_mllama_tiles_by_image_size(tiny, size, tiles):
    processor = transformers.AutoProcessor.from_pretrained(tiny("mllama"))
    out = processor(text=["<|image|>"], images=[Image.new("RGB", size)], return_tensors="pt")
    assert out["pixel_values"].shape == (1, 1, 4, 3, 56, 56)
    assert out["aspect_ratio_mask"].sum() == tiles
    assert out["cross_attention_mask"][0, -1].sum() == tiles


@pytest.mark.parametrize(
    ("size", "slices", "tokens"),
    [
        ((56, 56), 0, 4),
        ((112, 112), 0, 4),
        ((8, 8), 0, 4),
        ((112, 224), 2, 3 + 8),
        ((300, 300), 9, 40),
    ],
)
def test_minicpm_slices_by_image_size(tiny, size, slices, tokens):
    processor = transformers.AutoProcessor.from_pretrained(tiny("minicpmv4_6"))
    out = processor(text=["<|image_pad|>"], images=[Image.new("RGB", size)], return_tensors="pt")
    text = processor.tokenizer.decode(out["input_ids"][0])
    assert (text.count("<slice>"), text.count("<|image_pad|>")) == (slices, tokens)
    assert out["target_sizes"].shape == (1 + slices, 2)
    assert out["target_sizes"].prod(-1).sum() == 16 * tokens


@pytest.mark.parametrize("family", VISION)
def test_image_changes_the_answer(tiny, family):
    model, processor = load(tiny(family), family)
    inputs = encode(processor, family)
    with torch.no_grad():
        one = model(**inputs).logits
        inputs["pixel_values"] = -inputs["pixel_values"]
        assert not torch.allclose(one, model(**inputs).logits, atol=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_two_builds_are_byte_equal(family, tmp_path):
    torch.manual_seed(1)
    build(family, tmp_path / "a", size="test")
    state = torch.get_rng_state()
    torch.manual_seed(2)
    build(family, tmp_path / "b", size="test")
    build(family, tmp_path / "c", size="test", seed=1)
    a, b, c = ({f.name: f.read_bytes() for f in (tmp_path / x).iterdir()} for x in "abc")
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {"model.safetensors"}
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())  # the caller's random state is left alone


def test_the_gates_of_mllama_are_open(tiny):
    """They start at 0 in a model from its config, and no pixel would change anything."""
    model, _ = load(tiny("mllama"), "mllama")
    gates = [p for name, p in model.named_parameters() if "gate" in name and p.numel() == 1]
    assert len(gates) == 2 + 2 + 3  # cross-attention, a global layer, three of the tower's inputs
    assert all(gate == 0.5 for gate in gates)
    with pytest.raises(ValueError, match="mllama cannot tie"):
        build("mllama", tiny("mllama"), tie_word_embeddings=True)


def test_weights_on_disk_have_the_published_names(tiny):
    from safetensors import safe_open

    with safe_open(tiny("qwen2_5_vl") / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"model.embed_tokens.weight", "visual.patch_embed.proj.weight"} <= names
    assert "lm_head.weight" not in names  # tied


def test_demo_size_and_overrides(tmp_path):
    demo, _ = load(build("qwen2_5_vl", tmp_path / "demo"), "qwen2_5_vl")
    assert 1.0e6 < demo.num_parameters() < 1.2e6
    vision = {"depth": 3, "fullatt_block_indexes": [2]}
    folder = build("qwen2_5_vl", tmp_path / "deep", size="test", vision=vision, num_hidden_layers=4)
    model, _ = load(folder, "qwen2_5_vl")
    assert len(model.model.language_model.layers) == 4
    assert len(model.model.visual.blocks) == 3
    assert model.config.vision_config.fullatt_block_indexes == [2]


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(LookupError, match="known families"):
        build("clip", tmp_path)
    with pytest.raises(ValueError, match="known sizes: demo, test"):
        build("qwen3", tmp_path, size="huge")
    with pytest.raises(TypeError, match="no field 'num_layers'"):
        build("qwen2_vl", tmp_path, num_layers=2)
    with pytest.raises(TypeError, match="text model"):
        build("qwen3", tmp_path, vision={"depth": 2})
    assert list(tmp_path.iterdir()) == []
