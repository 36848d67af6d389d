"""One row: what it may say, where its images stand, and the reason of each error."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rowmakers import attempt, llava, messages, user, values, words
from vireo.data.conversation import Conversation, Image, Text
from vireo.data.rows import check_row, is_plain, parse_row
from vireo.errors import RowError


def reason(row) -> str:
    with pytest.raises(RowError) as caught:
        parse_row(row, "/images")
    assert len(str(caught.value)) < 1000
    return caught.value.reason


def with_field(role: str = "assistant", content="x", **fields) -> dict:
    """A row whose turn of that role has more than a text."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    turns[role == "assistant"] |= {"content": content, **fields}
    return {"messages": turns}


# -- one row -------------------------------------------------------------------------------------


def slots(row: dict) -> tuple[list, list]:
    """Values of the images, and the layout of the first user turn."""
    found = parse_row(row)
    first = next(turn for turn in found.turns if turn.role == "user")
    layout = [part.text if isinstance(part, Text) else part.index for part in first.parts]
    return [ref.value for ref in found.images], layout


ARRAY = np.zeros((2, 2, 3), np.uint8)
TOOL = {"name": "look", "arguments": {}}
IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "What?"}


@pytest.mark.parametrize(
    ("row", "images", "layout"),
    [
        (user("<image>What?", image="a"), ["a"], [0, "What?"]),
        (user("<image>\nA <image> b", images=["a", "b"]), ["a", "b"], [0, "\nA ", 1, " b"]),
        (user("What?", images=["a", "b"]), ["a", "b"], [0, 1, "What?"]),
        (user("<image>", image=["a"]), ["a"], [0]),
        (user("What?", images=[], image="a"), ["a"], [0, "What?"]),
        (user("What?", images=["a"], image="a"), ["a"], [0, "What?"]),
        (user([IMAGE, TEXT], image="a"), ["a"], [0, "What?"]),
        (user([TEXT], image="a"), ["a"], [0, "What?"]),
        (user([TEXT, IMAGE, TEXT], images=["a"]), ["a"], ["What?", 0, "What?"]),
        (user([IMAGE, {"type": "text", "text": "<image>?"}], images=["a"]), ["a"], [0, "<image>?"]),
        (user([{"type": "text", "text": "<image>?"}], images=["a"]), ["a"], [0, "?"]),
        (user([{"type": "image", "image": "a"}, TEXT]), ["a"], [0, "What?"]),
        (user([{"type": "image", "path": "a"}, IMAGE], images=["b"]), ["a", "b"], [0, 1]),
        (user([{"type": "image", "url": "data:,x"}]), ["data:,x"], [0]),
        (user([{"type": "image_url", "image_url": {"url": "data:,x"}}]), ["data:,x"], [0]),
        (user([{"type": "image_url", "image_url": "data:,x"}]), ["data:,x"], [0]),
        (user([{"type": "image", "image": {"path": "a"}}]), [{"path": "a"}], [0]),
        (user([{"type": "image", "image": "a"}], images=["a"]), ["a"], [0]),
        (user([{"type": "image", "image": "a", "path": "a"}]), ["a"], [0]),
        (user("<image>?"), [], ["<image>?"]),
        (user("What is <image> for?", image=None), [], ["What is <image> for?"]),
        (user("What is <image> for?", image_path="a.png"), [], ["What is <image> for?"]),
        (user("<image>?", image_path=None, source="x"), [], ["<image>?"]),
        (user("Hi", image=""), [], ["Hi"]),
        (user("Hi", image=None, images=[]), [], ["Hi"]),
        (user([], image=None), [], []),
        (user("", image="a"), ["a"], [0]),
    ],
)
def test_images_and_their_places(row, images, layout):
    assert slots(row) == (images, layout)


def test_placeholders_in_the_system_turn_come_first():
    row = messages(("system", "<image>"), ("user", "<image>?"), ("assistant", "<image>"))
    found = parse_row(row | {"images": ["a", "b"]})
    assert [turn.parts for turn in found.turns] == [
        (Image(0),),
        (Image(1), Text("?")),
        (Text("<image>"),),
    ]


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (None, "row_type"),
        ([], "row_type"),
        (7, "row_type"),
        ({}, "no_conversation"),
        ({"conversations": None, "messages": None}, "no_conversation"),
        ({"conversations": []}, "no_conversation"),
        ({"messages": {}}, "no_conversation"),
        ({"messages": ["q", "r"]}, "no_conversation"),
        ({"messages": [None]}, "no_conversation"),
        (llava() | user("q"), "ambiguous_format"),
        ({"messages": [{"role": "user", "from": "gpt", "content": "x"}]}, "ambiguous_format"),
        ({"messages": [{"role": "user", "value": "y", "content": "x"}]}, "ambiguous_format"),
        (messages(("user", "q")), "no_assistant"),
        (messages(("system", "q")), "no_assistant"),
        (user("q", ""), "empty_assistant"),
        (user("q", " \n\t"), "empty_assistant"),
        (user("q", []), "empty_assistant"),
        (messages(("assistant", "r"), ("user", "q"), ("assistant", "")), "empty_assistant"),
        (messages(("moderator", "q")), "unknown_role"),
        (messages((None, "q")), "unknown_role"),
        (messages((7, "q")), "unknown_role"),
        (messages((["user"], "q")), "unknown_role"),
        ({"messages": [{"content": "q"}]}, "unknown_role"),
        *[(user(q), "content_type") for q in (None, 7, 1.5, True, {}, {"text": "x"})],
        *[(user([q]), "content_type") for q in ("x", None, 7, [])],
        (user("q", None), "content_type"),
        ({"messages": [{"role": "user"}]}, "content_type"),
        (user([{"type": "text"}]), "content_type"),
        (user([{"type": "text", "text": 7}]), "content_type"),
        (user([{"type": "audio", "audio": "x"}]), "part_type"),
        (user([{"type": "input_text", "text": "x"}]), "part_type"),
        (user([{"text": "x"}]), "part_type"),
        (user([{"type": None}]), "part_type"),
        (user([{"type": ["image"]}]), "part_type"),
        (user([{"type": "video", "video": "x.mp4"}]), "video"),
        (user([{"type": "video_url", "video_url": {"url": "x"}}]), "video"),
        (user("q", videos=["x.mp4"]), "video"),
        (user("q", video="x.mp4"), "video"),
        (user("<image><image>", image="a"), "placeholder_count"),
        (user("<image>", images=["a", "b"]), "placeholder_count"),
        (user("<image>\nWhat?", image=None), "placeholder_count"),
        (user("What?\n<image>", images=[]), "placeholder_count"),
        (user("<image>What?", image=""), "placeholder_count"),
        (user("<image>\nWhat?", image_path="a.png"), "placeholder_count"),
        (user("What?\n<image>", Img=["a.png"]), "placeholder_count"),
        (user([IMAGE]), "placeholder_count"),
        (user([IMAGE, IMAGE], images=["a"]), "placeholder_count"),
        (user([IMAGE], images=["a", "b"]), "placeholder_count"),
        (user([{"type": "image", "image": "a"}], images=["b"]), "placeholder_count"),
        (user("q", "<image>", images=["a"]), "placeholder_count"),
        (messages(("assistant", "r"), images=["a"]), "placeholder_count"),
        (user("<image>", image="a", images=["b"]), "ambiguous_image"),
        (user([{"type": "image", "image": "a", "path": "b"}]), "ambiguous_image"),
        *[
            (user("<image>", image=image), "bad_image_value")
            for image in (
                *(17, 1.5, True, {}, {"path": None}, {"path": 7}, {"bytes": "text"}),
                *([None], [""], [["a.png"]], ["a.png", None][1:], "nul\0.png", "half\ud800.png"),
                *({"bytes": [137, 80]}, {"url": "a.png"}, float("nan"), [[[0, 0, 0]]]),
            )
        ],
        (user([{"type": "image", "image": ["a"]}]), "bad_image_value"),
        (user("<image>", image="http://x.y/a.png"), "remote_image"),
        (user("<image>", image={"path": "https://x.y/a.png"}), "remote_image"),
        (user([{"type": "image_url", "image_url": {"url": "HTTP://x.y"}}]), "remote_image"),
        (user("<image>", image="s3://bucket/a.png"), "remote_image"),
        (user("<image>", image="../a.png"), "outside_root"),
        (user("<image>", image="/etc/passwd"), "outside_root"),
        (user("<image>", image="file:///etc/passwd"), "outside_root"),
        (user("<image>", image={"path": "x/../../a.png"}), "outside_root"),
        *[
            (user("q", weight=weight), "weight")
            for weight in (-1, -0.5, float("nan"), float("inf"), True, "1", [1], 10**400, 1e39)
        ],
        ({"messages": [{"role": "assistant", "content": "r", "weight": 0}]}, "weight"),
        (user("half \ud800"), "unicode"),
        (user("q", "\udfff"), "unicode"),
        (user([{"type": "text", "text": "\ud800"}]), "unicode"),
        (user("q", id="\ud800"), "unicode"),
        (user("q", tools="no json"), "tool_calls"),
        (user("q", tools=[7]), "tool_calls"),
        (user("q", tools={"name": "x"}), "tool_calls"),
        (user("q", tools=[{"name": "\ud800"}]), "unicode"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "{"}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "tool_calls"),
        (with_field("user", tool_calls=[{"name": "look"}]), "tool_calls"),
        (with_field(tool_calls=[{}]), "tool_calls"),
        (with_field(tool_calls=[{"function": {"name": ""}}]), "tool_calls"),
        (with_field(tool_calls=[{"name": "look", "arguments": '{"a": "\\ud800"}'}]), "unicode"),
        (with_field(tool_calls='[{"name": "look", "name": "see"}]'), "tool_calls"),
        (with_field(function_call={"name": "look", "arguments": "{}"}), "tool_calls"),
        (with_field("user", image="a.png"), "bad_image_value"),
        (with_field("user", images=["a.png"]) | {"images": ["a.png"]}, "bad_image_value"),
        (with_field("user", video="a.mp4"), "video"),
        (with_field("user", reasoning_content="hm"), "content_type"),
        *[(with_field(reasoning_content=odd), "content_type") for odd in (7, True, ["hm"], {})],
        *[(with_field(name=odd), "content_type") for odd in (True, ["x"], {"x": 1})],
        (with_field(tool_call_id=["x"]), "content_type"),
        (with_field(reasoning_content="hm", thinking="ha"), "ambiguous_format"),
        *[(with_field(**{key: "\ud800"}), "unicode") for key in ("name", "reasoning_content")],
        (with_field(content="", reasoning_content=" "), "empty_assistant"),
        (with_field(content=None, reasoning_content=""), "content_type"),
        (with_field(content=None, tool_calls=[]), "content_type"),
        (user([{"type": "text", "text": "q", "image": "a.png"}]), "part_type"),
        (user([{"type": "image", "image": "a.png", "text": "a dog"}]), "part_type"),
        (user([{"type": "image", "bytes": "iVBOR"}]), "bad_image_value"),
        (user("<image>", images=[["a.png"], None]), "bad_image_value"),
        (user("<image>", image=ARRAY, images=ARRAY), "bad_image_value"),
        (user([{"type": "image", "image": ARRAY}], images=[ARRAY]), "bad_image_value"),
        (user([{"type": "image", "bytes": ARRAY}], images=[ARRAY]), "bad_image_value"),
        (user("<image>", image=["a.png", ["b.png"]]), "bad_image_value"),
    ],
)
def test_bad_rows_are_refused_by_reason(row, word):
    assert reason(row) == word
    assert not is_plain(row)


def test_roles_of_both_formats_in_any_case():
    names = ["system", "Human", "user", "GPT", "assistant", "model", "tool", "function"]
    row = {"conversations": [{"from": name, "value": "x"} for name in names]}
    roles = [turn.role for turn in parse_row(row).turns]
    assert roles == ["system", "user", "user", *["assistant"] * 3, "tool", "tool"]
    mixed = {"messages": [{"from": "human", "value": "q"}, {"role": "assistant", "content": "r"}]}
    assert len(parse_row(mixed).turns) == 2


def test_tool_calls_as_objects_or_json_text():
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "Oslo"}}}
    for calls in ([call], json.dumps([call]), [json.dumps(call)]):
        turn = {"role": "assistant", "content": None, "tool_calls": calls}
        found = parse_row({"messages": [turn], "tools": json.dumps([{"name": "look"}])})
        assert found.turns[0].tool_calls == (call,)
        assert (found.turns[0].parts, found.tools) == ((), ({"name": "look"},))
    for none in (None, [], "", "[]", "null"):
        assert parse_row(with_field(tool_calls=none)).turns[1].tool_calls == ()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"at": "Oslo"}', {"at": "Oslo"}),
        ("{}", {}),
        ("", {}),
        (None, {}),
        ({"at": '{"a": 1}'}, {"at": '{"a": 1}'}),
        ("Oslo, please", "Oslo, please"),
        ("[1]", "[1]"),
        ("7", "7"),
    ],
)
def test_arguments_of_calls_are_objects_unless_they_are_free_text(arguments, wanted):
    """As the engines hand them to chat templates, of which some would quote JSON text again."""
    inner = {"name": "look", "arguments": arguments}
    flat, nested = inner, {"id": 7, "type": "function", "function": inner}
    found = parse_row(with_field(tool_calls=[flat, nested])).turns[1].tool_calls
    assert found == (
        {"name": "look", "arguments": wanted},
        {"id": 7, "type": "function", "function": {"name": "look", "arguments": wanted}},
    )
    assert inner["arguments"] is arguments  # the row stays as it was


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "tool_calls": [{"name": "look"}]},
        {"from": "gpt", "value": None, "tool_calls": [{"name": "look"}]},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "content": None, "reasoning": "hm"},
        {"role": "assistant", "thinking": "hm"},
    ],
)
def test_a_call_or_a_thought_needs_no_text(turn):
    found = parse_row({"messages": [{"role": "user", "content": "q"}, turn]}).turns[1]
    assert found.parts == ()
    assert found.tool_calls or found.reasoning_content == "hm"


def test_names_ids_and_thoughts_are_kept_where_a_row_has_them():
    turns = [
        {"role": "user", "content": "q", "name": "Ann"},
        {"role": "assistant", "content": "", "reasoning_content": " hm\n", "tool_calls": [TOOL]},
        {"role": "tool", "content": "3", "tool_call_id": 7, "name": "look"},
        {"role": "assistant", "content": "a", "reasoning_content": "", "name": None},
    ]
    kept = [
        (t.reasoning_content, t.name, t.tool_call_id) for t in parse_row({"messages": turns}).turns
    ]
    assert kept == [
        (None, "Ann", None),
        (" hm\n", None, None),
        (None, "look", "7"),
        ("", None, None),
    ]


def test_ids_are_text():
    for value, text in ((7, "7"), ("7", "7"), (3.5, "3.5"), (None, None), (["a"], "['a']")):
        assert parse_row(llava() | {"id": value}).id == text


def test_other_columns_are_kept_aside():
    found = parse_row(llava(source="x", answer="Red.", meta={"a": 1}, weight=0.5))
    assert (found.extra, found.weight) == ({"source": "x", "meta": {"a": 1}}, 0.5)


def test_text_is_kept_byte_for_byte():
    text = " \n\te\u0301 \u202eabc \0 👩‍👩‍👧 <|im_end|>\u2028\r\n  "
    found = parse_row(user(text, text))
    assert [turn.text for turn in found.turns] == [text, text]


# -- anything ------------------------------------------------------------------------------------

turns = st.fixed_dictionaries(
    {},
    optional={
        "from": words | values,
        "role": words | values,
        "value": words | values,
        "content": words | values | st.lists(st.dictionaries(words, words | values), max_size=3),
        "tool_calls": values,
        "reasoning_content": values,
        "name": values,
        "images": values,
        "weight": values,
    },
)
near_rows = st.fixed_dictionaries(
    {},
    optional={
        "id": values,
        "conversations": st.lists(turns, max_size=3),
        "messages": st.lists(turns, max_size=3),
        "image": values,
        "images": values,
        "weight": values,
        "tools": values,
        "videos": values,
    },
)


@settings(max_examples=200, deadline=None)
@given(values | near_rows)
def test_any_value_is_a_conversation_or_a_row_error(row):
    found = attempt(lambda: parse_row(row, "/images"))
    if isinstance(found, RowError):
        assert len(str(found)) < 1000
        assert not is_plain(row)
        return
    assert isinstance(found, Conversation)
    count = sum(isinstance(part, Image) for turn in found.turns for part in turn.parts)
    assert count == len(found.images)


plain_rows = st.fixed_dictionaries(
    {
        "conversations": st.lists(
            st.fixed_dictionaries(
                {"from": st.sampled_from(["human", "gpt", "system"]), "value": words | st.text()}
            ),
            max_size=3,
        )
    },
    optional={
        "id": st.text() | st.integers(),
        "image": words | st.text(alphabet="a./ ~-_\\:", min_size=1),
        "extra": values,
    },
)


@settings(max_examples=200, deadline=None)
@given(plain_rows)
def test_the_short_cut_accepts_nothing_that_the_full_check_refuses(row):
    if is_plain(row):
        check_row(row, "/images")
