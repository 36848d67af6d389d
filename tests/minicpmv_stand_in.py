"""A stand-in for MiniCPM-V 4.0 and 4.5, whose models transformers has no class for.

A checkpoint of theirs brings its own Python code. The files in tests/data/minicpmv_stand_in/ keep
to the same contract (what its processor returns, what its model takes) and share nothing else with
it: not run on a published checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel

from vireo.families.tiny import templates
from vireo.families.tiny.sizes import MAX_POSITIONS
from vireo.families.tiny.tokenizer import EMBEDDING_SIZE, Tokens, make_tokenizer

CODE = Path(__file__).parent / "data" / "minicpmv_stand_in"
TOKENS = Tokens(
    special=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"),
        *("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"),
    ),
    end_of_turn="<|im_end|>",
    end_of_text="<|endoftext|>",
)
QUERIES = 4  # tokens of a slice
AUTO = {
    "config.json": {
        "AutoConfig": "configuration_minicpm.MiniCPMVConfig",
        "AutoModel": "modeling_minicpmv.MiniCPMV",
        "AutoModelForCausalLM": "modeling_minicpmv.MiniCPMV",
    },
    "preprocessor_config.json": {
        "AutoProcessor": "processing_minicpmv.MiniCPMVProcessor",
        "AutoImageProcessor": "image_processing_minicpmv.MiniCPMVImageProcessor",
    },
}


def build(out: Path | str) -> Path:
    """Write the checkpoint (about 0.2 M parameters, float32) into `out`; its code runs."""
    out = Path(out)
    write_folder(out)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        config = AutoConfig.from_pretrained(out, trust_remote_code=True)
        model = AutoModel.from_config(config, trust_remote_code=True, dtype=torch.float32)
        with torch.no_grad():  # what a fresh one makes of a picture is next to nothing
            model.vpm.patch_embedding.weight *= 3
            model.resampler.attn.in_proj_weight *= 2
    model.save_pretrained(out)
    write_folder(out)  # transformers has taken out of it what it does not know
    return out


def write_folder(out: Path) -> None:
    """All but the weights."""
    shutil.copytree(CODE, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    tokenizer = make_tokenizer(templates.chatml(), MAX_POSITIONS, TOKENS)
    tokenizer.save_pretrained(out)
    ids = tokenizer.convert_tokens_to_ids
    config = {
        "model_type": "minicpmv",
        "architectures": ["MiniCPMV"],
        "dtype": "float32",
        "vocab_size": EMBEDDING_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "query_num": QUERIES,
        "vision_batch_size": 2,
        "vision_config": {
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
        },
        "token_ids": {
            "unk": ids("<unk>"),
            "starts": ids(["<image>", "<slice>"]),
            "ends": ids(["</image>", "</slice>"]),
        },
    }
    processor = {
        "image_processor_type": "MiniCPMVImageProcessor",
        "processor_class": "MiniCPMVProcessor",
        "image_feature_size": QUERIES,
    }
    for name, fields in (("config.json", config), ("preprocessor_config.json", processor)):
        text = json.dumps({**fields, "auto_map": AUTO[name]}, indent=1)
        (out / name).write_text(text)


def as_published(stand_in: Path, out: Path) -> Path:
    """A copy whose code is as public copies have it, for transformers 4.51: it calls no `post_init`
    and leaves its buffers as they are when they are made."""
    shutil.copytree(stand_in, out)
    file = out / "modeling_minicpmv.py"
    code = file.read_text().replace("        self.post_init()\n", "")
    file.write_text(code.replace("def _init_weights", "def never_called"))
    # In one process transformers would take a model's code for that of another whose config's is
    # the same.
    with (out / "configuration_minicpm.py").open("a") as config:
        config.write("# as published\n")
    return out
