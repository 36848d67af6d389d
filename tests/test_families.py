"""A family's entry says what is true of the real classes: layers, parts, processor keys."""

import operator
from dataclasses import replace

import pytest
import torch
import transformers
from PIL import Image

from tests.tiny_models import FAMILIES
from vireo.families import Key, family_of, get_family
from vireo.families.tiny import build
from vireo.models.names import part_of

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def loaded(request, tmp_path_factory):
    """(entry, model, processor or tokenizer) of each family's tiny checkpoint."""
    folder = build(request.param, tmp_path_factory.mktemp(request.param), size="test")
    entry = get_family(request.param)
    model = getattr(transformers, entry.auto_class).from_pretrained(folder)
    loader = transformers.AutoProcessor if entry.has_vision else transformers.AutoTokenizer
    return entry, model, loader.from_pretrained(folder)


def class_names(model):
    return {type(module).__name__ for module in model.modules()}


def test_the_entry_is_found_by_the_loaded_config(loaded):
    entry, model, _ = loaded
    assert family_of(model.config) is entry


def test_an_unknown_family_names_the_known_ones():
    with pytest.raises(LookupError, match=r"'clip' is not known; known families: .*llama, llava"):
        get_family("clip")


def test_layer_classes_exist_in_the_model(loaded):
    entry, model, _ = loaded
    present = class_names(model)
    for names in (entry.decoder_layers, entry.vision_layers):
        assert bool(names) == bool(present & set(names))
    if not {*entry.decoder_layers, *entry.vision_layers} <= present:  # those of other checkpoints
        assert type(model.config).sub_configs["text_config"] is transformers.AutoConfig


def test_an_alias_is_not_a_class_of_the_model(loaded):
    entry, model, _ = loaded
    assert not set(entry.layer_aliases) & class_names(model)


def test_parts_cover_every_parameter(loaded):
    entry, model, _ = loaded
    paths = [path for part in entry.parts.values() for path in part]
    for path in paths:
        assert operator.attrgetter(path)(model) is not None  # a module, or a parameter by itself
    for name, _ in model.named_parameters(remove_duplicate=False):
        assert part_of(name, entry) is not None, name


def test_embeddings_and_head_are_the_ones_transformers_uses(loaded):
    entry, model, _ = loaded
    (embeddings,), (head,) = entry.parts["embeddings"], entry.parts["head"]
    assert model.get_submodule(embeddings) is model.get_input_embeddings()
    assert model.get_submodule(head) is model.get_output_embeddings()


def test_keys_are_what_the_processor_returns(loaded):
    entry, _, processor = loaded
    if not entry.has_vision:
        assert entry.keys == {}
        return
    image = Image.new("RGB", (56, 56), "red")
    out = processor(text=[entry.placeholder], images=[image], return_tensors="pt")
    assert set(out) == {"input_ids", "attention_mask", *entry.keys}
    for name, key in entry.keys.items():
        if key.kind == "token":
            one = out[name][0]  # the row of a batch of one
            assert one.shape[key.axis] == out["input_ids"].shape[1]


def test_a_placeholder_grows_where_the_entry_says_so(loaded):
    entry, _, processor = loaded
    if entry.has_vision:
        text = f"a{entry.placeholder}"
        out = processor(text=[text], images=[Image.new("RGB", (56, 56))])
        short = processor.tokenizer.encode(text, add_special_tokens=False)
        (ids,) = out["input_ids"]
        assert (list(ids)[-len(short) :] != short) == entry.expands


def test_image_tokens_are_single_special_tokens(loaded):
    entry, _, processor = loaded
    tokenizer = getattr(processor, "tokenizer", processor)
    for token in entry.image_tokens:
        (token_id,) = tokenizer.encode(token, add_special_tokens=False)
        assert tokenizer.added_tokens_decoder[token_id].special


def test_a_misspelt_kind_is_refused():
    with pytest.raises(ValueError, match=r"Key\('pakced'\): expected one of token, packed, padded"):
        Key("pakced")
    with pytest.raises(ValueError, match="llama: positions '3d', expected one of 1d, mrope"):
        replace(get_family("llama"), positions="3d")
