"""XLA's persistent compilation cache, which the command turns on (an import never does)."""

import os
from pathlib import Path

import jax


def enable() -> str | None:
    """Keeps compiled programs in the user's cache folder, so that the next start compiles nothing.

    `JAXFUSE_CACHE` moves the folder; `0` turns the cache off. The folder has mode 0700: whoever can write to it
    can run code as its user.

    Returns:
        A note for the user when the cache cannot be used, else None.
    """
    chosen = os.environ.get("JAXFUSE_CACHE")
    if chosen == "0":
        return None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(chosen).expanduser() if chosen else Path(base or Path.home() / ".cache") / "jaxfuse"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return f"no compilation cache ({error}); set JAXFUSE_CACHE to a folder of yours, or to 0"
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        return f"no compilation cache: others can write to {folder}; `chmod 700` it, or set JAXFUSE_CACHE"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no compilation cache: {folder} is not writable; set JAXFUSE_CACHE to a folder of yours, or to 0"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return None
