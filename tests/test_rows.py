"""One row: what it may say, where its images stand, and the reason of each error."""

from __future__ import annotations

import json

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


# -- one row -------------------------------------------------------------------------------------


def slots(row: dict) -> tuple[list, list]:
    """Values of the images, and the layout of the first user turn."""
    found = parse_row(row)
    first = next(turn for turn in found.turns if turn.role == "user")
    layout = [part.text if isinstance(part, Text) else part.index for part in first.parts]
    return [ref.value for ref in found.images], layout


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
            for weight in (-1, -0.5, float("nan"), float("inf"), True, "1", [1], 10**400)
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
        ({"messages": [{"role": "user", "content": "", "tool_calls": [{}]}]}, "tool_calls"),
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
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "Oslo"}'}}
    for calls in ([call], json.dumps([call]), [json.dumps(call)]):
        turn = {"role": "assistant", "content": None, "tool_calls": calls}
        found = parse_row({"messages": [turn], "tools": json.dumps([{"name": "look"}])})
        assert found.turns[0].tool_calls == (call,)
        assert (found.turns[0].parts, found.tools) == ((), ({"name": "look"},))


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
