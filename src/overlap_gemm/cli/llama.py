"""The demo's model: a Llama of the `transformers` package, trained on bytes, and checked."""

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
"""Tokens are bytes."""

ALLOWED_FACTOR = 4.0
"""The sharded model may be this many times as far from float64 as the unsharded one is."""


def build(ranks: int, layers: int, head_dim: int, sequence: int, seed: int = 0) -> LlamaForCausalLM:
    """A Llama with random weights, the same on every rank that passes the same seed.

    Args:
        ranks: Ranks that will share it: heads and key/value heads become multiples of it.
        layers: Decoder layers.
        head_dim: Width of a head; the hidden size is that of at least 8 heads.
        sequence: Longest sequence it will see.
        seed: Of the weights.
    """
    kv_heads = ranks * -(-4 // ranks)
    hidden = 2 * kv_heads * head_dim
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=2 * kv_heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=sequence,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def default_text() -> Path:
    """A text that every installation carries: this package's license."""
    files = importlib.metadata.files("overlap-gemm") or []
    return next(Path(str(file.locate())) for file in files if file.name == "LICENSE")


def batches(text: Path, batch: int, sequence: int, device: torch.device, seed: int = 0) -> Iterator[Tensor]:
    """Endless random windows `[batch, sequence + 1]` of a file's bytes, the same on every rank.

    Raises:
        ValueError: The file is shorter than a window.
    """
    data = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    if len(data) <= sequence:
        raise ValueError(f"{text} has {len(data)} bytes, a window needs {sequence + 1}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - sequence, (batch,), generator=generator)
        yield torch.stack([data[start : start + sequence + 1] for start in starts]).to(device)


def loss_of(model: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of the next byte, and the logits `[batch, sequence, 256]`, whole on every rank."""
    logits = whole(model(tokens[:, :-1]).logits)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), logits


def whole(tensor: Tensor) -> Tensor:
    """The unsharded tensor behind a DTensor; any other as it is. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    model: LlamaForCausalLM, data: Iterator[Tensor], steps: int, after_step: Callable[[float], object]
) -> None:
    """AdamW for `steps` batches; `after_step` gets each step's loss."""
    # DTensors and plain tensors (the embedding) do not mix in one foreach call.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), foreach=False)
    for _ in range(steps):
        loss, _ = loss_of(model, next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(loss.item())


@dataclass(frozen=True)
class Comparison:
    """How far the sharded model is from the unsharded one in float64.

    Attributes:
        what: The compared values.
        error: Largest difference, as a part of the reference's largest magnitude.
        rounding: The same for the unsharded model in the sharded one's dtype: what rounding alone costs.
    """

    what: str
    error: float
    rounding: float

    @property
    def allowed(self) -> float:
        """The tolerance of `error`."""
        return ALLOWED_FACTOR * self.rounding

    @property
    def holds(self) -> bool:
        """Whether `error` is within `allowed` (NaN is not)."""
        return self.error <= self.allowed


def compare(sharded: LlamaForCausalLM, tokens: Tensor) -> list[Comparison]:
    """Logits and gradients of the sharded model against the unsharded model with its weights. Collective.

    The reference computes in float64, except where Hugging Face's code itself turns to float32 (norms, rotary
    angles), which every model here has in common.

    Args:
        sharded: What `parallelize_module` made of a `build`.
        tokens: A batch, the same on every rank.
    """
    weights = {name: whole(value.detach()) for name, value in sharded.state_dict().items()}
    plain = LlamaForCausalLM(sharded.config)
    plain.load_state_dict(weights)
    plain.to(tokens.device)
    logits, gradients = _evaluate(sharded, tokens)
    plain_logits, plain_gradients = _evaluate(plain, tokens)
    true_logits, true_gradients = _evaluate(plain.double(), tokens)

    def largest(gradients: dict[str, Tensor]) -> float:
        distances = [_distance(gradients[name], reference) for name, reference in true_gradients.items()]
        return torch.tensor(distances, dtype=torch.float64).max().item()  # NaN wins here, and loses in max()

    return [
        Comparison("logits", _distance(logits, true_logits), _distance(plain_logits, true_logits)),
        Comparison("gradients", largest(gradients), largest(plain_gradients)),
    ]


def _evaluate(model: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss, logits = loss_of(model, tokens)
    loss.backward()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    model.zero_grad()
    return logits.detach(), gradients


def _distance(tensor: Tensor, reference: Tensor) -> float:
    return ((tensor.double() - reference).abs().max() / reference.abs().max()).item()
