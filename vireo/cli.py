"""The `vireo` command: a table of commands, each of which imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from vireo import __version__
from vireo.errors import InputError
from vireo.main import run_main


class _Parser(argparse.ArgumentParser):
    """argparse with this project's rules: `-` and `_` alike, no prefixes, errors as InputError."""

    def __init__(self, command: str):
        # A flag that is not given is left out, so that the default stands in one place only: in
        # the function that the command calls.
        super().__init__(
            prog=f"vireo {command}",
            description=COMMANDS[command][1],
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        self._sections: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._passing = False

    def section(self, name: str, section: Any, **defaults: Any) -> None:
        """A flag for each setting of a settings section, which types them and words their errors.

        `read` returns the section itself under `name`. `defaults`: where this command has others.
        """
        from vireo.settings.flags import flags_of

        self._sections[name] = section, defaults
        for flag in flags_of(section):
            default = defaults.get(flag.dotted, flag.default)
            shown = flag.type if default is None else f"{flag.type}; default: {default}".lower()
            said = f"{flag.meaning} ({shown})".replace("%", "%%")
            switch: dict[str, Any] = {"nargs": "?", "const": "true"} if flag.is_bool else {}
            self.add_argument(f"--{flag.dotted}", help=said, **switch)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}")

    def read(self, argv: list[str]) -> dict[str, Any]:
        """The arguments by name. InputError: one is unknown (names the nearest), bad or missing."""
        known = list(self._option_string_actions)
        alike, passed = [], dict[str, str]()
        tokens = deque(argv)
        while tokens:
            token = tokens.popleft()
            if token.startswith("--"):
                flag, equals, value = token.partition("=")
                token = "--" + flag[2:].replace("-", "_") + equals + value
                if token.partition("=")[0] not in known:
                    if not self._passing or not token.startswith(("--sglang_", "--vllm_")):
                        raise InputError(f"{self.prog}: unknown flag {flag}{_hint(flag, known)}")
                    if not equals and tokens and not tokens[0].startswith("--"):
                        value = tokens.popleft()
                    passed[flag[2:].replace("_", "-")] = value
                    continue
            alike.append(token)
        given = vars(self.parse_args(alike))
        for name, (section, defaults) in self._sections.items():
            from vireo.settings.load import read_section

            mine = {key: given.pop(key) for key in section.model_fields if key in given}
            if passed and "server_args" in section.model_fields:
                mine["server_args"] = passed
            given[name] = read_section(section, defaults | mine)
        return given


def _hint(name: str, names: list[str]) -> str:
    from vireo.nearest import nearest

    near = nearest(name, names)
    return f"; did you mean {near}?" if near else f"; there are {', '.join(names)}"


def _no_bars() -> None:
    """No progress bars of transformers for models that load in a second."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number of at least 1")
    return int(text)


def _refuse_other_model(out: str, family: str) -> None:
    """A tiny model is rewritten over one of its family, never over another model."""
    import json
    from pathlib import Path

    config = Path(out) / "config.json"
    if config.exists() and json.loads(config.read_text()).get("model_type") != family:
        raise InputError(f"{out} holds a model of another family; choose another folder")


def _train(argv: list[str]) -> int:
    from vireo.train import main as train

    return train(argv)


def _tiny(argv: list[str]) -> None:
    parser = _Parser("tiny")
    parser.add_argument("family", help="model family")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--size", choices=("demo", "test"), help="demo can learn; test is quicker")
    parser.add_argument("--seed", type=int, help="seed of the random weights")
    given = parser.read(argv)
    from vireo.families.tiny import build

    _no_bars()
    _refuse_other_model(given["out"], given["family"])
    try:
        build(given["family"], given["out"], **_without(given, "family", "out"))
    except LookupError as error:
        raise InputError(f"{parser.prog}: {error}") from error
    print(f"wrote {given['out']}")


def _graft(argv: list[str]) -> None:
    from vireo.families.graft import SIZES

    parser = _Parser("graft")
    parser.add_argument("--lm", required=True, help="folder or Hub name of the text model")
    parser.add_argument("--family", required=True, help="model family to make of it")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--tower", choices=SIZES, help="its size (default: published)")
    parser.add_argument("--seed", type=int, help="seed of the new random weights")
    given = parser.read(argv)
    from vireo.models.graft import graft

    _no_bars()
    made = graft(**given)
    before, after = made.rows
    print(
        f"control tokens added: {len(made.tokens)}; rows of embeddings: {after:,} ({before:,} "
        f"before); new parameters: {made.parameters:,}"
    )
    print(f"wrote {given['out']}")


def _data(argv: list[str]) -> None:
    parser = _Parser("data")
    kinds = ("digits", "shapes", "layouts", "reasoning-gym")
    parser.add_argument("kind", choices=kinds, help="which data")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--task", help="which task (reasoning-gym only)")
    parser.add_argument("--rows", type=int, help="rows to draw (shapes and reasoning-gym)")
    parser.add_argument("--seed", type=int, help="seed of the order and of what is drawn")
    given = parser.read(argv)
    options = _without(given, "kind", "out")
    if given["kind"] == "reasoning-gym":
        from vireo.data.reasoning import write_reasoning_gym

        print(f"wrote {write_reasoning_gym(given['out'], **options)}")
        return
    if "task" in options:
        raise InputError(f"{parser.prog} {given['kind']}: --task is for reasoning-gym")
    if given["kind"] == "layouts" and options:
        raise InputError(f"{parser.prog} layouts: --rows and --seed are for the other kinds")
    if given["kind"] == "digits" and "rows" in options:
        raise InputError(f"{parser.prog} digits: --rows is for shapes; there are 1,797 digits")
    from vireo.data import layouts, synthetic

    module: Any = layouts if given["kind"] == "layouts" else synthetic
    getattr(module, f"write_{given['kind']}")(given["out"], **options)
    print(f"wrote {given['out']}")


def _settings(argv: list[str]) -> None:
    parser = _Parser("settings")
    parser.add_argument("--trainer", default="fsdp_vlm", help="trainer (default: %(default)s)")
    parser.add_argument("--schema", action="store_true", help="JSON Schema of a settings file")
    given = parser.read(argv)
    from vireo.settings import describe
    from vireo.trainers import registry

    registry.locate(given["trainer"])
    if "schema" in given:
        import json

        from vireo.settings.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    print(describe(given["trainer"]), end="")


def _rewards(argv: list[str]) -> None:
    _Parser("rewards").read(argv)
    from vireo.named import named
    from vireo.rewards import REWARDS

    for name in REWARDS:
        said = " ".join((named("reward", name, REWARDS).__doc__ or "").split())
        print(f"{name:<14}{said}")


def _env(argv: list[str]) -> None:
    parser = _Parser("env")
    parser.add_argument("--json", action="store_true", help="as JSON")
    given = parser.read(argv)
    import json

    from vireo.report.environment import as_markdown, environment

    found = environment()
    print(json.dumps(found, indent=1) if "json" in given else as_markdown(found).rstrip())


def _export(argv: list[str]) -> None:
    parser = _Parser("export")
    parser.add_argument("ckpt", help="checkpoint folder")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp32"), help="format of the weights")
    parser.add_argument(
        "--merge_lora", action="store_true", help="whole weights, not the adapters alone"
    )
    parser.add_argument("--base", help="with --merge_lora: the base, if it has moved since")
    parser.add_argument("--max_shard_size", help="largest weight file (default: 5GB)")
    parser.add_argument("--push_to_hub", metavar="ORG/NAME", help="upload it to the Hub as well")
    parser.add_argument("--public", action="store_true", help="make a new Hub repository public")
    _trust_flag(parser)
    given = parser.read(argv)
    repo, public = given.get("push_to_hub"), given.get("public", False)
    if public and not repo:
        raise InputError(f"{parser.prog}: --public is for --push_to_hub; leave it out")
    from vireo.training.export import export
    from vireo.training.hub import check_push, push

    _no_bars()
    if repo:
        check_push(repo)
    options = _without(given, "ckpt", "out", "push_to_hub", "public")
    export(given["ckpt"], given["out"], **options, **({"repo": repo} if repo else {}))
    print(f"wrote {given['out']}")
    if repo:
        print(f"pushed to {push(given['out'], repo, private=not public)}")


def _rollout(argv: list[str]) -> None:
    parser = _Parser("rollout")
    parser.epilog = "The same command goes on where one was killed."
    _model_flags(parser)
    parser.add_argument("--prompts", required=True, help="data file; rows need no answer")
    parser.add_argument("--out", required=True, help="folder for the samples and a summary")
    parser.add_argument("--limit", type=_count, help="prompts at most")
    parser.add_argument("--reward", help="rewards A,B of each sample, or MODULE:FUNCTION")
    _engine_flags(parser)
    parser.section("sampling", _sampling())
    given = parser.read(argv)
    import json

    from vireo.rollout.run import rollout

    _no_bars()
    reward = given.pop("reward", "").split(",") if given.get("reward") else []
    print(json.dumps(rollout(**given, reward=reward), indent=2))


def _eval(argv: list[str]) -> None:
    parser = _Parser("eval")
    _model_flags(parser)
    parser.add_argument("--eval_file", required=True, help="data file")
    parser.add_argument("--limit", type=_count, help="rows at most")
    parser.add_argument("--batch_size", type=_count, help="answers at a time (default: 16)")
    parser.add_argument("--output_dir", help="folder for the answers")
    parser.add_argument(
        "--reward", help="measure, or MODULE:FUNCTION; 1 is right (default: exact_match)"
    )
    _engine_flags(parser)
    parser.section("sampling", _sampling(), max_new_tokens=64, temperature=0.0)
    given = parser.read(argv)
    import json

    from vireo.evaluation import evaluate_files

    _no_bars()
    print(json.dumps(evaluate_files(**given), indent=2))


def _mismatch(argv: list[str]) -> int:
    parser = _Parser("mismatch")
    parser.epilog = "The exit code is 1 if engine and trainer part."
    _model_flags(parser)
    parser.add_argument("--data", required=True, help="data file; rows need no answer")
    parser.add_argument("--limit", type=_count, help="rows at most (default: 8)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="format (default: the model's)")
    parser.add_argument("--other_model", help="weights to try, such as those before an update")
    parser.add_argument(
        "--update",
        action="store_true",
        help="ask, send the engine the model's weights, ask again (an engine that is started has "
        "those of --other_model first)",
    )
    parser.add_argument("--out", help="folder for mismatch.json and mismatch.html")
    _engine_flags(parser)
    parser.section("sampling", _sampling(), max_new_tokens=16)
    given = parser.read(argv)
    from vireo.rl.compare import mismatch

    _no_bars()
    return 0 if mismatch(**given).agrees else 1


def _check_sync(argv: list[str]) -> int:
    parser = _Parser("check-sync")
    parser.epilog = "The exit code is 1 if checksums differ; the tensors are named."
    parser.add_argument("--model", required=True, help="folder or Hub name of the model")
    parser.add_argument(
        "--folder", help="where weights are written that the engine reads (default: temporary)"
    )
    _trust_flag(parser)
    _engine_flags(parser)
    given = parser.read(argv)
    from vireo.checks.sync import check_sync

    _no_bars()
    return 1 if any(check.apart for check in check_sync(**given)) else 0


def _model_flags(parser: _Parser) -> None:
    """A model that answers rows of a data file."""
    parser.add_argument("--model", required=True, help="folder or Hub name of the model")
    parser.add_argument("--processor", help="folder or Hub name of the processor")
    parser.add_argument("--image_root", help="folder that image paths start from")
    parser.add_argument("--image_size", type=int, help="size of an image, as in training")
    parser.add_argument(
        "--image_strategy", choices=("longest", "pad_square"), help="as in training"
    )
    _trust_flag(parser)


def _sampling() -> Any:
    from vireo.settings.rollout import SamplingSettings

    return SamplingSettings


def _serve(argv: list[str]) -> None:
    parser = _Parser("serve")
    parser.add_argument("--model", required=True, help="folder or Hub name of the model")
    parser.add_argument("--host", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port; 0 is any free one (default: 30000)")
    parser.add_argument("--api_key", help="key that every call needs")
    parser.add_argument("--admin_api_key", help="key that control calls need instead")
    parser.add_argument("--processor", help="folder or Hub name of the processor")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp32"), help="format of the weights")
    parser.add_argument("--max_rows", type=_count, help="requests computed at once")
    parser.add_argument("--image_size", type=int, help="resize images first, as in training")
    parser.add_argument(
        "--image_strategy", choices=("longest", "pad_square"), help="as in training"
    )
    parser.add_argument(
        "--allow_image_urls", action="store_true", help="fetch images given by http(s) URL"
    )
    _trust_flag(parser)
    given = parser.read(argv)
    from vireo.rollout.server import serve

    _no_bars()
    serve(**given)


def _preview(argv: list[str]) -> None:
    parser = _Parser("preview")
    _training_flags(parser, model_required=True)
    parser.add_argument(
        "-n", dest="count", type=_count, metavar="N", help="rows of each file (default: 4)"
    )
    parser.add_argument("--html", help="write a page, not text")
    given = parser.read(argv)
    from vireo.report.preview import preview

    _no_bars()
    preview(**given)


def _doctor(argv: list[str]) -> None:
    parser = _Parser("doctor")
    parser.epilog = (
        "The exit code is 0 also when rows are bad (their number is the first line), and 2 when "
        "a file or the model cannot be read."
    )
    _training_flags(parser, model_required=False)
    for name in ("global_batch_size", "per_device_train_batch_size", "num_epochs"):
        parser.add_argument(f"--{name}", help="as in training")
    parser.add_argument("--world", type=_count, help="ranks of the run to foretell (default: 1)")
    parser.add_argument("--json", dest="json_file", metavar="JSON", help="write the report there")
    parser.add_argument("--html", dest="html_file", metavar="HTML", help="write a page there")
    given = parser.read(argv)
    from vireo.report.doctor import doctor

    if "vlm_model_name_or_path" in given:
        _no_bars()
    doctor(**given)


def _plan(argv: list[str]) -> None:
    parser = _Parser("plan")
    parser.add_argument(
        *("--model", "--vlm_model_name_or_path", "--model_name_or_path"),
        dest="vlm_model_name_or_path",
        metavar="MODEL",
        required=True,
        help="folder or Hub name of the model, of which the config is read",
    )
    parser.add_argument("--max_length", required=True, help="tokens of a row, images among them")
    parser.add_argument("--gpus", type=_count, help="how many (default: 1)")
    parser.add_argument("--gpu", help="which: a100, h100, h200, b200 (default: h200)")
    parser.add_argument("--images", type=int, help="images of a row (default: 1 if it sees)")
    parser.add_argument("--image_size", type=_count, help="pixels of a side (default: 448)")
    parser.add_argument("--tiles", type=_count, help="tiles that an image is cut into (default: 1)")
    parser.add_argument("--supervised", type=_count, help="tokens with loss (default: all text)")
    for name in (
        *("max_tokens_per_gpu", "per_device_train_batch_size", "grad_accum_steps"),
        *("global_batch_size", "fsdp_sharding", "fsdp_shard_size"),
        *("lora_r", "lora_target_modules", "lora_ignore_modules"),
    ):
        parser.add_argument(f"--{name}", help="as in training")
    freezes = ("freeze_vision", "freeze_mm_proj", "freeze_language", "freeze_embeddings")
    for name in ("grad_ckpt", *freezes):
        parser.add_argument(f"--{name}", nargs="?", const="true", help="as in training")
    _trust_flag(parser)
    given = parser.read(argv)
    from vireo.plan.command import plan

    _no_bars()
    plan(**given)


def _view(argv: list[str]) -> None:
    parser = _Parser("view")
    parser.add_argument("run", metavar="RUN", help="folder of the run: its --output_dir")
    parser.add_argument("--html", metavar="FILE", help="write one page there, and serve nothing")
    parser.add_argument("--steps", type=_count, help="with --html: steps in it (default: 20)")
    parser.add_argument("--port", type=int, help="port of the server (default: any free one)")
    given = parser.read(argv)
    other = "port" if "html" in given else "steps"
    if other in given:
        raise InputError(f"{parser.prog}: --{other} does not go with what is asked; leave it out")
    from vireo.report.view import view

    view(**given)


def _training_flags(parser: _Parser, *, model_required: bool) -> None:
    """Flags of the trainer, whose settings check their values."""
    parser.add_argument("--train_file", required=True, help="data file, or several: A,B")
    parser.add_argument(
        *("--vlm_model_name_or_path", "--model_name_or_path"),
        required=model_required,
        help="folder or Hub name of the model",
    )
    for name in (
        *("processor_name_or_path", "chat_template", "image_root", "image_size"),
        *("image_strategy", "max_length", "max_tokens_per_gpu"),
    ):
        parser.add_argument(f"--{name}", help="as in training")
    _trust_flag(parser)


def _engine_flags(parser: _Parser) -> None:
    """Those of EngineSettings, as `engine`; --sglang-NAME and --vllm-NAME that are none of them go
    to a server that is started."""
    from vireo.settings.rollout import EngineSettings

    parser.section("engine", EngineSettings)
    parser._passing = True


def _trust_flag(parser: _Parser) -> None:
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run the code in the model's folder"
    )


def _check_family(argv: list[str]) -> int:
    parser = _Parser("check-family")
    parser.epilog = (
        "The exit code is 1 if a property fails. A family without an entry gets one to start from, "
        "on standard output."
    )
    parser.add_argument("model", help="folder or Hub name of the model")
    parser.add_argument("--rows", help="data file whose first rows are used where they can be")
    parser.add_argument("--json", dest="json_file", metavar="JSON", help="write the report there")
    _trust_flag(parser)
    given = parser.read(argv)
    import json

    from vireo.checks.grid import check_family
    from vireo.checks.starter import UnknownFamily
    from vireo.hub import local_folder
    from vireo.report.page import write

    _no_bars()
    model = local_folder(given["model"])
    try:
        report = check_family(model, **_without(given, "model", "json_file"), tell=_now)
    except UnknownFamily as error:
        print(error.entry, end="")
        raise
    if "json_file" in given:
        write(given["json_file"], json.dumps(report.as_dict(), indent=1) + "\n")
    return 1 if report.failed else 0


def _now(line: str) -> None:
    print(line, flush=True)


def _demo(argv: list[str]) -> None:
    parser = _Parser("demo")
    parser.add_argument("--rl", action="store_true", help="learn from rewards, by GRPO")
    parser.add_argument("--output_dir", help="folder (default: runs/demo; with --rl runs/demo-rl)")
    parser.add_argument("--seed", type=int, help="seed of the run")
    parser.add_argument("--max_steps", type=int, help="optimizer steps; with --rl rollouts")
    given = parser.read(argv)
    print("importing torch and transformers ...", flush=True)
    _no_bars()
    if not given.pop("rl", False):
        from vireo.demo import run

        run(**given)
        return
    from vireo import demo_rl

    steps = {"num_rollout": given.pop("max_steps")} if "max_steps" in given else {}
    demo_rl.run(**given, **steps)


def _without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


COMMANDS: dict[str, tuple[Callable[[list[str]], int | None], str]] = {
    "train": (_train, "train a model; `vireo settings` lists the flags"),
    "demo": (_demo, "train and evaluate a tiny model on this machine"),
    "preview": (_preview, "show rows as the trainer sees them, token by token"),
    "doctor": (_doctor, "look at every row of a data file and report what is wrong with it"),
    "plan": (_plan, "foretell the memory and the time of a run on some GPUs"),
    "view": (_view, "show a run: its curves, and its rollouts token by token"),
    "eval": (_eval, "measure a model on a data file"),
    "rollout": (_rollout, "sample responses to the prompts of a data file"),
    "rewards": (_rewards, "list the rewards by name"),
    "mismatch": (_mismatch, "compare an engine's log-probs with the trainer's, rung by rung"),
    "check-sync": (_check_sync, "prove that weights reach an engine whole, by its own checksums"),
    "serve": (_serve, "answer prompts over HTTP, by SGLang's protocol"),
    "export": (_export, "turn a checkpoint into a folder that from_pretrained loads"),
    "settings": (_settings, "list every setting of a trainer"),
    "check-family": (_check_family, "test whether a model's family is right, property by property"),
    "env": (_env, "print versions and machine, to paste into a bug report"),
    "graft": (_graft, "put a new vision tower before a text model"),
    "tiny": (_tiny, "write a tiny random model of a family"),
    "data": (_data, "write a small data set with images"),
}


def _help() -> str:
    rows = "\n".join(f"  {name:<14}{text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: vireo COMMAND ...\n\nPost-training for vision-language models.\n\n"
        f"commands (`vireo COMMAND --help` says more):\n{rows}\n\n"
        "options:\n  --help    show this text\n  --version show the version\n"
        "  --debug   show the traceback of an error too"
    )


def _dispatch(name: str, rest: list[str]) -> int | None:
    if name not in COMMANDS:
        near = _hint(name, list(COMMANDS))
        raise InputError(f"unknown command {name!r}{near}")
    return COMMANDS[name][0](rest)


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, 1 failed, 2 bad input, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    if argv[:1] == ["--debug"]:
        argv = [*argv[1:], "--debug"]
    if not argv or argv[0] in ("--help", "-h"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"vireo {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name != "train":  # which has it as a setting, with a value perhaps
        rest = [token for token in rest if token != "--debug"]
    return run_main(partial(_dispatch, name, rest), debug=debug)
