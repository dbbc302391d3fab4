"""What a dry run tries of environments and tools."""

from pathlib import Path

import pytest

from splitppo.config import rules
from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.models.tiny import build_tiny
from splitppo.run.main import dry_run

pytestmark = pytest.mark.ranks  # environments have worker processes

TOOLS = "{% if tools %}{{ tools[0].function.name }}: a tool\n{% endif %}"
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETS = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last"
    " else m.content }}",
)
ENV = """
from splitppo.envs import Message, Turn

class Env:
    def __init__(self, row, seed): ...
    def reset(self): return None
    def step(self, message): return Turn([Message("user", "so?")])
    def close(self): ...

class Fails(Env):
    def step(self, message): return Turn(reward=1 / len(message.content))

class Breaks(Env):
    def reset(self): raise ValueError("no board")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose templates read tools, don't, and forget what was thought; environments."""
    folder = tmp_path_factory.mktemp("models")
    for name, template in (("reads", TOOLS + PLAIN), ("plain", PLAIN), ("forgets", FORGETS)):
        build_tiny(folder / name, seed=1)
        (folder / name / "chat_template.jinja").write_text(template)
    (folder / "env.py").write_text(ENV)
    return folder


def tried(folder: Path, model: str, *argv: str) -> str:
    given = [f"--policy.path={folder / model}", "--data.task=addition", "--log.validate-every=0"]
    given += ["--rollout.max-new-tokens=60"]
    config = parse([*given, *(word.format(d=folder) for word in argv)])
    rules.check(config)
    return dry_run(config, Launch())


def test_the_prompts_show_the_tools(folder: Path):
    bare = len("user: What is 1+2?<eos>\nassistant: ".replace("<eos>", "e"))
    assert f"max_prompt_tokens = {bare}\n" in tried(folder, "plain")
    told = tried(folder, "reads", "--env.tools=calculator", "--env.call-format=hermes")
    assert f"max_prompt_tokens = {bare + len('calculator: a tool') + 1}\n" in told
    assert "max_context = 1024\n" in told
    assert "schemas go" not in told
    told = tried(folder, "plain", "--env.tools=calculator")
    assert "the chat template takes no tools: their schemas go into the system mess" in told


def test_calls_that_the_template_does_not_show_need_a_format(folder: Path):
    with pytest.raises(UserError, match=r"^env\.call_format=auto: the chat template takes tools"):
        tried(folder, "reads", "--env.tools=calculator")


def test_a_template_that_rewrites_is_refused_or_passed_over(folder: Path):
    env = "--env.path={d}/env.py:Env"
    with pytest.raises(UserError, match="rewrites earlier messages when more follow"):
        tried(folder, "forgets", env)
    assert "warning: the environment" not in tried(folder, "forgets", env, "--env.rewritten=keep")


def test_an_environment_is_made_and_takes_a_step(folder: Path):
    told = tried(folder, "plain", "--env.path={d}/env.py:Fails")
    assert "warning: the environment Fails fails on an empty message: ZeroDivisionError" in told
    with pytest.raises(UserError, match=r"the environment Breaks does not start: .*no board"):
        tried(folder, "plain", "--env.path={d}/env.py:Breaks")
