"""Two small trainings that Vireo and TRL both run: their model, their rows, and Vireo's side.

Everything is made on the spot, so the same call gives the same model and rows anywhere. Nothing
here imports TRL: `tests/test_trl_parity.py` compares Vireo with TRL's recorded losses.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

GOLDEN = Path(__file__).parent / "golden"

STEPS = 50
SHORT = 10  # steps of a run that is quick enough for every test run
ROWS = 82  # ten steps of 8 rows and one of 2, then the next epoch
MICRO_BATCH = 4
ACCUMULATION = 2
LR = 2e-3
CLIP = 1.0
TOLERANCE = 1e-4  # between two losses of a step

# TRL finds the assistant's tokens by `generation` tags; Vireo finds them in any template and does
# not look at the tags. The end-of-turn token is the assistant's, the line end after it is not.
TEMPLATE = """
{%- macro said(content) %}
  {%- if content is string %}{{- content }}
  {%- else %}
    {%- for part in content %}
      {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
      {%- else %}{{- part.text }}
      {%- endif %}
    {%- endfor %}
  {%- endif %}
{%- endmacro %}
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' }}
  {%- if message.role == 'assistant' %}
    {%- generation %}{{- said(message.content) + '<|im_end|>' }}{%- endgeneration %}
  {%- else %}{{- said(message.content) + '<|im_end|>' }}
  {%- endif %}
  {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip()

COLOURS = {"red": "#d62728", "green": "#2ca02c", "blue": "#1f77b4", "yellow": "#f2c80f"}
SIZES = ((56, 56), (84, 56), (28, 84))
NOUNS = ("river", "lamp", "stone", "garden", "clock", "window", "bridge", "coat")


@dataclass(frozen=True)
class Case:
    """A training; `schedule` as both programs call it, `warmup` in steps.

    `blind_steps`: whether every third step of the picture rows has no picture at all.
    """

    name: str
    family: str
    trainer: str
    schedule: str
    weight_decay: float
    steps: int = STEPS
    warmup: int = 0
    blind_steps: bool = False


# No decay where there is a vision tower: TRL decays some norms of it that Vireo does not.
TEXT = Case("text", "qwen3", "fsdp", "linear", weight_decay=0.1)
VLM = Case("vlm", "qwen2_5_vl", "fsdp_vlm", "cosine", weight_decay=0.0)


def write_case(case: Case, folder: Path) -> tuple[Path, Path]:
    """The model's folder and the data file, written to `folder`."""
    from vireo.families.tiny import build

    model = build(case.family, folder / "model", size="test")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = text_rows() if case.family == TEXT.family else picture_rows(folder, case.blind_steps)
    data = folder / "rows.json"
    data.write_text(json.dumps(rows, indent=1))
    return model, data


def text_rows() -> list[dict[str, Any]]:
    """Chats of one to three questions, some with a system turn, with answers of 1 to 24 words."""
    draw = random.Random(1)
    rows = []
    for i in range(ROWS):
        turns = []
        if i % 4 == 0:
            turns.append({"role": "system", "content": "Answer in lower case."})
        for _ in range(draw.randint(1, 3)):
            count, noun = draw.randint(1, 12), draw.choice(NOUNS)
            turns.append({"role": "user", "content": f"Write {noun} {count} times."})
            turns.append({"role": "assistant", "content": " ".join([noun] * count)})
        rows.append({"id": f"text-{i}", "messages": turns})
    return rows


def picture_rows(folder: Path, blind_steps: bool) -> list[dict[str, Any]]:
    """Chats with 0, 1 or 2 pictures, between words and in later turns; pictures go to `folder`.

    In every third step the second micro-batch has no picture; with `blind_steps`, nor the first.
    """
    draw = random.Random(2)
    rows: list[dict[str, Any]] = []
    made = 0
    for i in range(ROWS):
        step, place = divmod(i, MICRO_BATCH * ACCUMULATION)
        blind = step % 3 == 1 and (blind_steps or place >= MICRO_BATCH)
        count = 0 if blind else draw.randint(1, 2) if place == 0 else draw.randint(0, 2)
        colours = [draw.choice(list(COLOURS)) for _ in range(count)]
        names = []
        for colour in colours:
            names.append(f"{made}.png")
            picture(colour, SIZES[made % len(SIZES)], draw).save(folder / names[-1])
            made += 1
        turns = []
        if count == 2 and i % 2:
            turns += ask("First", None, "then", None, "Which colours?", " and ".join(colours))
        else:
            for colour in colours:
                turns += ask(None, "Which colour is it?", f"It is {colour}.")
        if count == 0 or i % 5 == 0:
            noun, times = draw.choice(NOUNS), draw.randint(1, 9)
            turns += ask(f"Write {noun} {times} times.", " ".join([noun] * times))
        rows.append({"id": f"picture-{i}", "images": names, "messages": turns})
    return rows


def ask(*parts: str | None) -> list[dict[str, Any]]:
    """A user's turn, None for a picture, and the answer: the last part."""
    said = [{"type": "image"} if part is None else text(part) for part in parts[:-1]]
    return [
        {"role": "user", "content": said},
        {"role": "assistant", "content": [text(parts[-1] or "")]},
    ]


def text(part: str) -> dict[str, str]:
    return {"type": "text", "text": part}


def picture(colour: str, size: tuple[int, int], draw: random.Random) -> Image.Image:
    """A disc of that colour somewhere on a ground of its own."""
    image = Image.new("RGB", size, tuple(draw.randrange(200, 256) for _ in range(3)))
    side = draw.randint(14, 26)
    x, y = draw.randrange(size[0] - side), draw.randrange(size[1] - side)
    ImageDraw.Draw(image).ellipse((x, y, x + side, y + side), fill=COLOURS[colour])
    return image


def train_vireo(case: Case, model: Path, data: Path, output: Path) -> list[dict[str, Any]]:
    """What Vireo recorded of each step in its run folder, `output`."""
    from vireo.settings import load_settings
    from vireo.trainers import registry

    settings = load_settings(
        [
            f"--trainer={case.trainer}",
            f"--vlm_model_name_or_path={model}",
            f"--train_file={data}",
            f"--output_dir={output}",
            f"--max_steps={case.steps}",
            f"--per_device_train_batch_size={MICRO_BATCH}",
            f"--grad_accum_steps={ACCUMULATION}",
            "--shuffle=false",
            "--packing=false",
            "--freeze_vision=false",
            "--fsdp_mp_dtype=fp32",
            f"--lr={LR}",
            f"--lr_scheduler={case.schedule}",
            f"--warmup_ratio={case.warmup / case.steps}",
            f"--weight_decay={case.weight_decay}",
            f"--clip_grad_norm={CLIP}",
            "--num_workers=0",
            "--report_to=none",
        ]
    )
    registry.find(settings.trainer)(settings)
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]
