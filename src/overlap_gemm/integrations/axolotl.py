"""Plug-in for axolotl: its models become tensor-parallel over all ranks, and its checkpoints continue.

    plugins:
      - overlap_gemm.integrations.axolotl.OverlapGemmPlugin

axolotl loads a plug-in that a configuration names, in every process. Before adapters are added, the model is
passed to `parallelize` with its defaults; the Trainer is axolotl's own with `ShardedCheckpoints`
(`integrations.trainer` lists who writes which file). The group is the world: data parallelism alongside it
is not supported. Settings for which axolotl shards models by itself, quantizes them or replaces its Trainer
are refused by name: those of `SIZES` and `UNSUPPORTED`.

All ranks get the same batches, so `max_steps` and `warmup_steps` should be set: axolotl divides its estimates
by the world size. Importing this module requires axolotl.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin

from ..parallel import parallelize
from ..runtime.bootstrap import init
from .trainer import ShardedCheckpoints

SIZES = (
    "tensor_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "dp_shard_size",
    "dp_replicate_size",
)
"""Settings that must be unset or 1."""
UNSUPPORTED = (
    "fsdp", "fsdp_config", "deepspeed", "load_in_8bit", "load_in_4bit", "rl", "reward_model",
    "process_reward_model", "trainer_cls",
)  # fmt: skip
"""Settings that must be unset or false."""


class OverlapGemmPlugin(BasePlugin):  # type: ignore[misc]
    """Plug-in that axolotl creates by its name in a configuration."""

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Makes the model tensor-parallel over all ranks. Called by axolotl before it adds adapters.

        Collective. Settings are checked here, so after the weights have been loaded.

        Args:
            cfg: axolotl's configuration.
            model: Unsharded model of a family that `parallelize` supports; changed in place.

        Raises:
            ValueError: A setting is not supported, or `parallelize` has no rule for a module.
        """
        wrong = [f"{name}: {cfg.get(name)}" for name in SIZES if (cfg.get(name) or 1) != 1]
        wrong += [f"{name}: {cfg.get(name)}" for name in UNSUPPORTED if cfg.get(name)]
        if wrong:
            raise ValueError(
                f"axolotl with overlap_gemm's plug-in does not support {', '.join(wrong)}: unset it; "
                "the plug-in shards the model over all ranks"
            )
        parallelize(model, init().mesh())

    def get_trainer_cls(self, cfg: Any) -> type:
        """Returns axolotl's Trainer with checkpoints of parallelized models. Called by axolotl.

        The class is a new one at each call, for any `cfg`.
        """
        from axolotl.core.trainers import AxolotlTrainer

        return type("OverlapAxolotlTrainer", (ShardedCheckpoints, AxolotlTrainer), {})
