"""Push an exported folder to the Hugging Face Hub.

`check_push` runs before a run starts and `push` when it has ended, so that days of training do not
end on a name with a typing error or on a token that nobody had set.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from vireo.errors import InputError, VireoError, first_line

# Of an earlier push. Left beside new ones they would be loaded in their place: transformers takes
# model.safetensors before an index of shards, and any folder with adapter_config.json for adapters.
_STALE = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]


def check_repo_name(repo: str) -> None:
    """InputError unless `repo` is a name ORG/NAME that the Hub allows."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo.count("/") != 1:
        raise InputError(f"--push_to_hub {repo}: expected ORG/NAME, such as my-team/my-model")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f"--push_to_hub {repo}: {first_line(error)}") from error


def check_push(repo: str) -> None:
    """InputError unless a push to `repo` can be tried: its name, a token, and the Hub's word on it.

    Asks the Hub once who the token belongs to. Whether it may write to ORG only a push can tell.
    """
    check_repo_name(repo)
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise InputError(
            f"--push_to_hub {repo}: HF_HUB_OFFLINE is set; unset it, or leave --push_to_hub out"
        )
    if huggingface_hub.get_token() is None:
        raise InputError(
            f"--push_to_hub {repo}: there is no Hub token; run `hf auth login` or set HF_TOKEN"
        )
    try:
        huggingface_hub.HfApi().whoami()
    except Exception as error:
        raise InputError(f"--push_to_hub {repo}: {_reason(error)}") from error


def push(folder: str | Path, repo: str, private: bool = True) -> str:
    """Upload an exported folder as repository `repo`, made if it is new; returns its address.

    `private` holds for a new repository; an old one stays as it is. Weights of an earlier push that
    `folder` does not have are removed; all else in the repository stays. VireoError: the push did
    not succeed; the folder is untouched, and the message says how to try again.
    """
    check_repo_name(repo)
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        there = [name for name in api.list_repo_files(repo) if "/" not in name]
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Upload model",
            delete_patterns=[n for n in there if any(fnmatch(n, stale) for stale in _STALE)],
        )
    except Exception as error:
        raise VireoError(
            f"{folder} could not be pushed to {repo}: {_reason(error)}; the folder is whole, push "
            f"it again with: hf upload {repo} {folder}"
        ) from error
    return str(url)


def _reason(error: Exception) -> str:
    """One line that says what a person can do, or else the Hub's or the network's own words."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__  # an upload in a thread wraps the answer in an error of its own
    status = cause.response.status_code if cause is not None else None
    if status == 401:
        return "the Hub refused the token (401): run `hf auth login`, or set another HF_TOKEN"
    if status == 403:
        return "the token may not write there (403): use one with write access to that name"
    if cause is not None:
        return f"the Hub answered {status}: {first_line(cause)}"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it"
    return f"{type(error).__name__}: {first_line(error)}"
