"""`splitppo COMMAND ...` or `python -m splitppo COMMAND ...`: the trainer, and the tools beside
it."""

import importlib
import sys

from splitppo import __version__
from splitppo.config.cli import parse, read_call
from splitppo.errors import UserError, command, words
from splitppo.run import launcher

COMMANDS = {  # name: (module with a `main`, or with a function of that name; what it does)
    "train": (
        "splitppo.train",
        "train on one process, or on N ranks: --nproc_per_node N, and torchrun's other flags",
    ),
    "report": ("splitppo.tools.report", "draw a run's curves and the timeline of a step"),
    "plan": ("splitppo.tools.plan", "predict which placements fit, and which is the fastest"),
    "bench": ("splitppo.tools.bench", "measure placements and settings side by side"),
    "chat": (
        "splitppo.tools.chat",
        "chat with the policy after and before training, and see the critic's values",
    ),
    "eval": ("splitppo.tools.evaluate", "score a model or a checkpoint on held-out rows"),
    "export": ("splitppo.tools.export", "write a checkpoint's models as Hugging Face folders"),
    "push": ("splitppo.tools.push", "upload a checkpoint's models to the Hugging Face hub"),
    "prepare": ("splitppo.tools.prepare", "write the data of the presets"),
}


@command
def main() -> int:
    """Returns the exit status of the command that the first argument names."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: splitppo COMMAND ... | --version   (each command has its own --help)\n")
        print("\n".join(f"  {known:<8} {what}" for known, (_, what) in COMMANDS.items()))
        return 0
    if name == "--version":
        print(f"splitppo {__version__}")
        return 0
    if name not in COMMANDS:
        raise UserError(f"splitppo {name}: no such command; use one of {', '.join(COMMANDS)}")
    sys.argv = [f"splitppo {name}", *arguments]
    if name == "train" and {"-h", "--help"} & set(arguments):
        parse(arguments)  # without torch, which takes seconds to import
    flags, trainer_flags = launcher.split(arguments)
    if name == "train" and (flags or launcher.script_of(trainer_flags)):
        return launcher.launch(flags, trainer_flags)
    module = importlib.import_module(COMMANDS[name][0])
    if hasattr(module, "main"):
        return module.main()
    status = read_call(getattr(module, name), sys.argv[0], words())()
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
