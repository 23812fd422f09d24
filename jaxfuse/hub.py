"""From a folder's path or a hub's repository id to a local folder."""

import os
import re
from pathlib import Path

from jaxfuse.errors import CheckpointError

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_TEXT_FILES = ("*.json", "*.jinja", "merges.txt", "vocab.txt")


def resolve(path_or_repo_id: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """The folder of a checkpoint; a repository id such as `Qwen/Qwen3-0.6B` is fetched to the hub's cache.

    An existing path wins over a repository of the same name. Without `weights` the safetensors are not fetched.

    Raises:
        CheckpointError: when it is neither a folder nor a repository that can be had.
    """
    if not os.fspath(path_or_repo_id):
        raise CheckpointError("a model needs a name, got an empty one; give a folder or a repository (owner/name)")
    # os.path's functions, since pathlib's raise for a user who does not exist and for a name that is too long.
    path = Path(os.path.expanduser(path_or_repo_id))
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise CheckpointError(f"a model is a folder, but {path} is a file; give the folder that holds it")
    name = os.fspath(path_or_repo_id)
    if not _REPO_ID.fullmatch(name):
        raise CheckpointError(
            f"no folder {name!r}, and it is not a repository id (owner/name); check the path, or name a repository"
        )
    return _download(name, _TEXT_FILES + ("*.safetensors",) * weights)


def _download(repo_id: str, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub  # imported here: it takes longer to import than a local checkpoint needs

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's errors, and those of whichever HTTP library its release uses
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"cannot get {repo_id!r} from the hub ({first_line}); check the name and the network, or download the "
            "folder and give its path"
        ) from error
