"""Prompts in columns of their own: the published layouts, keys of the settings, rendered texts."""

from __future__ import annotations

import io
import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage

from tests.rowmakers import attempt, llava, values
from tests.tiny_models import FAMILIES, noise, renderer, row, user
from vireo import cli
from vireo.data import readers
from vireo.data.conversation import Conversation, Text, read_rows
from vireo.data.images import load_image
from vireo.data.layouts import BOXES, CONTEST, SUMS, write_layouts
from vireo.data.mixture import open_mixture
from vireo.data.prompt_rows import Columns, prompt_row
from vireo.data.readers import open_rows
from vireo.data.rows import Allowed, is_plain, parse_row
from vireo.errors import InputError, RowError

PROMPTS = Allowed(prompts=True)
ORIGINAL = {
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
}


def parsed(data, *keys: str | None) -> Conversation:
    return parse_row(
        prompt_row(data, Columns.of(*(*keys, None, None, None)[:3])), "/i", "", PROMPTS
    )


def refused(data, *keys: str | None) -> RowError:
    with pytest.raises(RowError) as caught:
        parsed(data, *keys)
    return caught.value


def said(found: Conversation) -> list:
    """Role and parts of each turn, an image as its number."""
    return [
        (t.role, *(p.text if isinstance(p, Text) else p.index for p in t.parts))
        for t in found.turns
    ]


def png(size: tuple[int, int] = (4, 3)) -> bytes:
    out = io.BytesIO()
    PILImage.new("RGB", size, "red").save(out, "PNG")
    return out.getvalue()


# -- the written samples -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_layouts(tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("name", ["dapo-math-17k.jsonl", "dapo-math-17k.parquet"])
def test_dapo_in_both_forms(folder, name):
    rows = open_rows(folder / name, allowed=PROMPTS)
    assert [r.extra["answer"] for r in rows] == [answer for _, answer in SUMS]
    for found, (text, _) in zip(rows, SUMS, strict=True):
        ((role, asked),) = said(found)
        assert role == "user"
        assert asked.startswith("Solve")
        assert asked.endswith(text)
        assert found.where.startswith(f"{name} row ")


def test_the_original_keeps_its_other_columns(folder):
    found = open_rows(folder / "dapo-math-17k.parquet", allowed=PROMPTS)[1]
    assert found.extra == {
        "data_source": "math_dapo",
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "row-1"},
        "answer": "2",
    }


def test_aime(folder):
    rows = open_rows(folder / "aime-2024.jsonl", allowed=PROMPTS)
    assert [(*said(r), r.extra) for r in rows] == [
        (("user", text), {"answer": answer}) for text, answer in CONTEST
    ]


def test_geometry3k(folder):
    rows = open_rows(folder / "geometry3k.parquet", allowed=PROMPTS)
    assert [r.extra for r in rows] == [{"answer": "70"}, {"answer": "55"}, {"answer": "54"}]
    for found in rows:
        question = "Two angles of a triangle are given in degrees. Find the third."
        assert said(found) == [("user", 0, question)]
        assert [load_image(ref).size for ref in found.images] == [(112, 84)]


def test_clevr_cogent(folder):
    rows = open_rows(folder / "clevr-cogent.parquet", allowed=PROMPTS)
    assert [r.extra["answer"] for r in rows] == [f"<answer> {n} </answer>" for n in (3, 5, 4)]
    assert all(said(r) == [("user", 0, "How many items are in the picture?")] for r in rows)


def test_refcoco_asks_for_a_box_by_its_corners(folder):
    rows = open_rows(folder / "refcoco.parquet", allowed=PROMPTS)
    for found, (colour, (x, y, width, height)) in zip(rows, BOXES, strict=True):
        ((role, slot, question),) = said(found)
        assert (role, slot) == ("user", 0)
        assert f'"the {colour} block"' in question
        box = found.extra["answer"]
        assert box == [x, y, x + width, y + height]
        inside = load_image(found.images[0]).crop(tuple(map(int, box)))
        assert len(inside.getcolors()) == 1  # the whole block, and nothing round it
        assert inside.getpixel((0, 0)) == PILImage.new("RGB", (1, 1), colour).getpixel((0, 0))


def test_refcoco_by_its_own_question(folder):
    columns = Columns(prompt="question", label="answer")
    found = open_rows(folder / "refcoco.parquet", allowed=PROMPTS, columns=columns)[0]
    assert said(found) == [("user", 0, "Which area is marked in the picture?")]
    assert found.extra["answer"] == ["the red block", "red one"]
    assert found.extra["bbox"] == [10, 8, 30, 24]  # an untouched column


def test_samples_are_the_same_bytes_each_time(folder, tmp_path):
    assert cli.main(["data", "layouts", str(tmp_path / "again")]) == 0
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(first) == 6
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == first


def test_the_command_takes_no_number_of_rows(tmp_path, capsys):
    assert cli.main(["data", "layouts", str(tmp_path / "x"), "--rows", "5"]) == 2
    assert "--rows and --seed are for the other kinds" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


# -- recognised rows -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "label"),
    [
        ({"prompt": "q", "label": 3}, 3),
        ({"prompt": "q", "label": 0}, 0),
        ({"problem": "q", "answer": ["a", "b"]}, ["a", "b"]),
        ({"question": "q", "solution": " x "}, " x "),
        ({"question": "q", "bbox": [1, 2, 3, 4]}, [1, 2, 3, 4]),  # nothing says what it means
        ({"prompt": "q", "solution": "2", "reward_model": {"ground_truth": "2"}}, "2"),
        ({"prompt": "q", "label": None, "answer": {"x": 1}, "messages": None}, {"x": 1}),
    ],
)
def test_labels_are_kept_as_they_are(data, label):
    found = parsed(data)
    assert said(found) == [("user", "q")]
    assert found.extra["answer"] == label
    assert type(found.extra["answer"]) is type(label)


def test_a_prompt_needs_no_label():
    assert parsed({"prompt": "q", "source": "s"}).extra == {"source": "s"}


def test_id_weight_and_tools_are_read_as_in_other_rows():
    tool = {"name": "look"}
    found = parsed({"id": 7, "weight": 0.5, "tools": [tool], "prompt": "q"})
    assert (found.id, found.weight, found.tools, found.extra) == ("7", 0.5, (tool,), {})


def test_image_places_follow_the_rules_of_other_rows():
    assert said(parsed({"problem": "a <image> b", "image": "x"})) == [("user", "a ", 0, " b")]
    assert said(parsed({"problem": "q", "images": ["x", "y"]})) == [("user", 0, 1, "q")]
    assert said(parsed({"problem": "is <image> a tag?"})) == [("user", "is <image> a tag?")]
    error = refused({"problem": "<image><image>", "images": ["x"]})
    assert error.reason == "placeholder_count"
    assert refused({"problem": "<image>q", "image_path": "x"}).reason == "placeholder_count"
    assert refused({"problem": "q", "image": "../x"}).reason == "outside_root"


def test_boxes_that_are_corners_already_stay():
    """The other published RefCOCO: its boxes are x1, y1, x2, y2, its pictures are files."""
    found = parsed(
        {
            "captions": ["left man", "man"],
            "bbox": [10.5, 20, 30, 44.5],
            "raw_anns": "{}",
            "image_path": "coco/train2014/a.jpg",
        }
    )
    assert found.extra["answer"] == [10.5, 20, 30, 44.5]
    assert [ref.value for ref in found.images] == ["coco/train2014/a.jpg"]
    assert '"left man"' in found.turns[0].text


def test_a_box_of_an_annotation_is_converted_when_it_is_named_too():
    data = {"question": "q", "bbox": [1, 2, 3, 4], "segmentation": [], "iscrowd": 0}
    assert parsed(data, "question", "bbox").extra["answer"] == [1, 2, 4, 6]
    for odd in ([1, 2, 3], "1 2 3 4", [1, 2, 3, True], [1, 2, 3, float("nan")], [[1, 2], [3, 4]]):
        assert refused(data | {"bbox": odd}, "question", "bbox").reason == "content_type"


@pytest.mark.parametrize(
    ("data", "flag"),
    [
        ({"prompt": "q", "problem": "r"}, "--input_key"),
        ({"problem": "q", "question": "r", "answer": "a"}, "--input_key"),
        ({"problem": "q", "solution": "long", "answer": "a"}, "--label_key"),
        ({"prompt": "q", "label": "1", "reward_model": {"ground_truth": "2"}}, "--label_key"),
        ({"question": "q", "answer": "a", "bbox": [1, 2, 3, 4]}, "--label_key"),
    ],
)
def test_a_row_that_can_be_read_in_two_ways_is_refused_with_the_flag(data, flag):
    error = refused(data)
    assert error.reason == "ambiguous_format"
    assert flag in error.message


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"text": "q"}, "no_conversation"),
        ({"prompt": ""}, "no_conversation"),
        ({"prompt": 3}, "content_type"),
        ({"prompt": ["q"]}, "content_type"),
        ({"prompt": [{"role": "who", "content": "q"}]}, "unknown_role"),
        ({"prompt": [{"role": "user", "content": "q"}, {"role": "gpt"}]}, "turn_order"),
        ({"prompt": "\ud800"}, "unicode"),
        ({"prompt": "q", "videos": ["v"]}, "video"),
        ({"answer": [], "bbox": [1, 2, 3, 4], "segmentation": [], "iscrowd": 0}, "content_type"),
        ("q", "row_type"),
        (None, "row_type"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(data, reason):
    assert refused(data).reason == reason


names = st.sampled_from(
    [
        *("prompt", "problem", "question", "label", "answer", "solution", "reward_model"),
        *("bbox", "ground_truth", "segmentation", "iscrowd", "captions", "raw_anns"),
        *("messages", "images", "image", "image_path", "id"),
    ]
)
texts = st.none() | st.sampled_from(["q", "<image>", "a.png"]) | values


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(names, texts | st.dictionaries(names, texts, max_size=2), max_size=7),
    st.none() | names,
    st.none() | names | st.just("reward_model.ground_truth"),
)
def test_any_row_is_read_or_refused_and_never_changed(data, prompt, label):
    before = repr(data)
    found = attempt(lambda: parsed(data, prompt, label))
    assert isinstance(found, Conversation | RowError)
    assert repr(data) == before


def test_a_row_without_a_known_column_says_what_it_has():
    assert "--input_key; the row has 'text', 'score'" in refused({"text": "q", "score": 1}).message


# -- keys ----------------------------------------------------------------------------------------


def test_keys_override_what_would_be_recognised():
    data = {"prompt": "no", "text": "yes", "answer": "no", "gold": 4, "image": "no", "pics": ["p"]}
    found = parsed(data, "text", "gold", "pics")
    assert said(found) == [("user", 0, "yes")]
    assert [ref.value for ref in found.images] == ["p"]
    assert found.extra == {"prompt": "no", "answer": 4}


def test_each_key_decides_for_itself():
    data = {"problem": "q", "solution": "long", "answer": "a", "images": "p"}
    assert parsed(data, None, "solution").extra == {"answer": "long"}
    assert parsed(data, "problem", "answer").extra == {"answer": "a", "solution": "long"}
    assert said(parsed({"prompt": "q", "question": "r"}, None, "question")) == [("user", "q")]


def test_dotted_paths_reach_into_objects():
    data = {"task": {"text": "q", "gold": {"value": False}}, "media": {"first": "p"}}
    found = parsed(data, "task.text", "task.gold.value", "media.first")
    assert said(found) == [("user", 0, "q")]
    assert found.extra == {**data, "answer": False}
    assert parsed({"a.b": "q", "a": {"b": "r"}}, "a.b").turns[0].text == "q"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (("promt", None, None), "'promt': name another with --input_key; the row has 'prompt'"),
        ((None, "reward_model.truth", None), "--label_key; the row has 'prompt', 'reward_model'"),
        ((None, "reward_model.truth", None), "'reward_model' has 'ground_truth', 'style'"),
        ((None, "prompt.0", None), "nothing in column 'prompt.0'"),
        ((None, None, "images"), "'images': name another with --multimodal_keys"),
    ],
)
def test_a_named_column_that_is_not_there_is_an_error(keys, named):
    error = refused(ORIGINAL, *keys)
    assert error.reason == "missing_column"
    assert named in error.message


def test_the_error_of_a_missing_column_names_the_row(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "q"}\n{"id": "b", "other": "q"}\n')
    columns = Columns(prompt="text")
    with pytest.raises(RowError) as caught:
        open_rows(path, allowed=PROMPTS, columns=columns)
    assert str(caught.value) == (
        "p.jsonl row 1 (id 'b', line 2): there is nothing in column 'text': name another with "
        "--input_key; the row has 'id', 'other' [missing_column]"
    )
    rows = open_rows(path, allowed=PROMPTS, columns=columns, on_bad_row="skip")
    assert (len(rows), rows.total) == (1, 2)


def test_columns_of_settings():
    assert Columns.of(None, None, None) == Columns()
    assert Columns.of("p", "a.b", "pics") == Columns("p", "a.b", "pics")
    assert Columns.of(None, None, '{"image": "images"}') == Columns(images="images")


@pytest.mark.parametrize(
    ("keys", "flag"),
    [
        (("a..b", None, None), "--input_key"),
        ((None, ".a", None), "--label_key"),
        ((None, None, '{"image": "a."}'), "--multimodal_keys"),
        ((None, None, '{"video": "v"}'), "--multimodal_keys"),
        ((None, None, '{"image": "i", "audio": "a"}'), "--multimodal_keys"),
        ((None, None, '{"image": ["i"]}'), "--multimodal_keys"),
        ((None, None, '{"image": '), "--multimodal_keys"),
    ],
)
def test_a_wrong_key_is_an_input_error_with_its_flag(keys, flag):
    with pytest.raises(InputError, match=f"^{flag}: found "):
        Columns.of(*keys)


# -- rows of chats -------------------------------------------------------------------------------


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_rows_of_chats_stay_as_they_are():
    data = {"messages": CHAT, "prompt": "p", "label": "l", "answer": "m"}
    assert prompt_row(data) is data
    found = parsed(data)
    assert [turn.role for turn in found.turns] == ["user", "assistant"]
    assert found.extra == {"prompt": "p", "label": "l", "answer": "m"}


def test_a_named_label_takes_the_place_of_the_answer_that_ends_a_chat():
    found = parsed({"messages": CHAT, "label": "l"}, None, "label")
    assert said(found) == [("user", "q")]
    assert found.extra == {"answer": "l"}
    assert len(parsed({"messages": CHAT, "label": "l"}, "messages").turns) == 2


def test_a_named_prompt_stands_above_a_chat_in_the_row():
    assert said(parsed({"conversations": CHAT, "messages": CHAT, "text": "t"}, "text")) == [
        ("user", "t")
    ]
    assert refused({"conversations": CHAT, "messages": CHAT}, None, "x").reason == (
        "ambiguous_format"
    )


def test_prompts_are_refused_where_rows_must_have_an_answer(folder):
    with pytest.raises(RowError, match=r"neither 'conversations' nor 'messages'"):
        open_rows(folder / "aime-2024.jsonl")


def test_the_short_cut_for_commonest_rows_is_still_taken(tmp_path, monkeypatch):
    """Neither the full check nor the tables of prompts see plain rows of chats."""
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(llava(str(i))) + "\n" for i in range(5)))
    assert is_plain(llava())

    def never(*_, **__):
        raise AssertionError("a plain row was looked at again")

    monkeypatch.setattr(readers, "check_row", never)
    assert len(open_rows(path, allowed=PROMPTS)) == 5
    monkeypatch.setattr(readers, "prompt_row", never)
    assert len(open_rows(path)) == 5


# -- containers ----------------------------------------------------------------------------------


def test_json_lines_arrays_and_parquet_are_read_alike(tmp_path):
    rows = [
        {"id": "a", "task": {"q": "one", "a": "1"}, "pics": ["x.png"], "note": "n"},
        {"id": "b", "task": {"q": "<image>two", "a": "2"}, "pics": ["y.png"], "note": None},
    ]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "r.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    columns = Columns.of("task.q", "task.a", '{"image": "pics"}')
    lines, array, parquet = (
        list(read_rows(tmp_path / f"r.{end}", allowed=PROMPTS, columns=columns))
        for end in ("jsonl", "json", "parquet")
    )
    for one, two, three in zip(lines, array, parquet, strict=True):
        assert said(one) == said(two) == said(three)
        assert one.images == two.images == three.images
        assert one.extra["answer"] == two.extra["answer"] == three.extra["answer"]
    assert [r.extra["answer"] for r in lines] == ["1", "2"]
    assert said(lines[0]) == [("user", 0, "one")]


def test_pictures_in_any_column_of_parquet_are_not_read_when_a_file_is_opened(
    tmp_path, monkeypatch
):
    table = pa.table(
        {
            "q.text": ["what?"],
            "pic": pa.array(
                [{"bytes": png(), "path": None}],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            ),
        }
    )
    path = tmp_path / "p.parquet"
    pq.write_table(table, path)
    seen = []
    real = readers.check_row
    monkeypatch.setattr(readers, "check_row", lambda r, *a: seen.append(r["images"]) or real(r, *a))
    columns = Columns(prompt="q.text", images="pic")
    rows = open_rows(path, allowed=PROMPTS, columns=columns)
    assert seen == [{"bytes": b""}]
    assert load_image(rows[0].images[0]).size == (4, 3)
    assert said(pickle.loads(pickle.dumps(rows))[0]) == [("user", 0, "what?")]


def test_a_saved_data_set_is_read_by_its_own_columns(tmp_path):
    import datasets

    made = datasets.Dataset.from_list([{"problem": "q", "answer": "a", "image": png()}])
    made.save_to_disk(tmp_path / "saved")
    (found,) = open_rows(tmp_path / "saved", allowed=PROMPTS)
    assert said(found) == [("user", 0, "q")]
    assert found.extra == {"answer": "a"}


def test_mixtures_pass_the_columns_on(folder):
    mixed = open_mixture(
        [folder / "aime-2024.jsonl", folder / "dapo-math-17k.jsonl"],
        allowed=PROMPTS,
        columns=Columns(label="label"),
    )
    assert len(mixed) == 6


# -- rendered texts ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rendered_text_is_the_prompt_that_its_conversation_is(family):
    """Control tokens, and a start of the text that the template wrote or the tokenizer adds."""
    whole = renderer(family)
    vision = whole.family.has_vision
    turns = user(*((0,) if vision else ()), "What is it?")
    images = [noise(84, 56)] if vision else []
    one = whole.rollout(row(turns, images=images))
    place = whole.family.written.strip() or whole.family.placeholder
    before, found, after = one.text.partition(place) if vision else (one.text, "", "")
    assert bool(found) == vision
    parts = (
        (before, 0, after.removeprefix("\n" if whole.family.written else ""))
        if vision
        else (before,)
    )
    two = renderer(family, chat_template="none").rollout(row(user(*parts), images=images))
    start = whole.tokenizer.bos_token or ""  # which some templates leave to the tokenizer
    assert two.text.removeprefix(start) == one.text.removeprefix(start)
    assert two.ids == one.ids
    assert two.expanded == one.expanded


def test_without_a_template_turns_stand_one_behind_the_other():
    raw = renderer("qwen3", chat_template="none")
    assert raw.rollout(row(user("Once "), user("upon a time"))).text == "Once upon a time"
    assert raw.template.last_end == "<|im_end|>"


@pytest.mark.parametrize("family", ["llama", "mllama"])
def test_the_tokenizers_own_start_of_a_text_is_there_once(family):
    raw = renderer(family, chat_template="none")
    start = raw.tokenizer.bos_token_id
    for text in ("Once", f"{raw.tokenizer.bos_token}Once"):
        made = raw.rollout(row(user(text)))
        assert made.text == f"{raw.tokenizer.bos_token}Once"
        assert made.ids[0] == start
        assert start not in made.ids[1:]


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|vision_start|>"])
def test_an_image_token_in_a_rendered_text_is_refused(token):
    raw = renderer("qwen2_5_vl", chat_template="none")
    with pytest.raises(RowError, match="<image> in the place of each picture") as caught:
        raw.rollout(row(user(0, f"{token}?"), images=[noise(56, 56)]))
    assert caught.value.reason == "reserved_token"


def test_elsewhere_a_typed_control_token_is_still_text():
    made = renderer("qwen2_5_vl")
    one = made.rollout(row(user("<|im_start|>")))
    control = made.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert one.ids.count(control) == one.text.count("<|im_start|>") - 1
