"""Another package is called kernels, too: Hugging Face's, which transformers imports."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_CLONE = Path(__file__).resolve().parent.parent


def give_way() -> None:
    """Puts Hugging Face's package, where it is installed, in the place of this folder as the module `kernels`."""
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != _CLONE]
    spec = PathFinder.find_spec("kernels", elsewhere)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["kernels"] = module  # what the import that is under way returns
    spec.loader.exec_module(module)
