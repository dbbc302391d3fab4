"""splitppo: PPO for language models on one torchrun, split into an actor and a critic group.

Your own script or notebook begins with `from splitppo import Config, run`. This does not import
torch; calling `run` in a script does.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from splitppo.config import Config as Config

if TYPE_CHECKING:
    from splitppo.run.launcher import run as run

__version__ = "0.2.0.dev0"


class _RunPackage(ModuleType):
    # Python finds the package `splitppo.run` under the name of the function `run`: to call it is to
    # call the function

    def __call__(self, *args: Any, **named: Any) -> None:
        importlib.import_module("splitppo.run.launcher").run(*args, **named)


importlib.import_module("splitppo.run").__class__ = _RunPackage
