"""Model of the demo: a Llama of the `transformers` package, trained on bytes and checked."""

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ..api.linears import gather_dtensor
from ..parallel import full_state_dict

VOCABULARY = 256
"""Size of the vocabulary: tokens are bytes."""

ALLOWED_FACTOR = 4.0
"""Maximum ratio of the sharded model's error to the unsharded model's, both against float64."""


def build(
    ranks: int, layers: int, head_dim: int, sequence: int, heads: int = 8, seed: int = 0
) -> LlamaForCausalLM:
    """Returns a Llama with random weights, the same on every rank for the same seed.

    Args:
        ranks: Number of ranks that share it; heads and key/value heads are multiples of it.
        layers: Number of decoder layers.
        head_dim: Width of a head, even; the hidden size is that of all heads.
        sequence: Maximum length of sequences.
        heads: Minimum number of attention heads; there are half as many key/value heads.
        seed: Seed of the weights.

    Raises:
        ValueError: ``head_dim`` is odd: rotary embeddings rotate pairs of elements.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    kv_heads = ranks * -(-heads // (2 * ranks))
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
    """Returns a text that every installation and checkout contains: this package's license."""
    checkout = Path(__file__).parents[3] / "LICENSE"
    if checkout.exists():
        return checkout
    files = importlib.metadata.files("overlap-gemm") or []
    return next(Path(str(file.locate())) for file in files if file.name == "LICENSE")


def batches(text: Path, batch: int, sequence: int, device: torch.device, seed: int = 0) -> Iterator[Tensor]:
    """Yields random windows `[batch, sequence + 1]` of a file's bytes, without end, the same on every rank.

    Raises:
        ValueError: The file is shorter than a window.
    """
    content = bytearray(text.read_bytes())
    if len(content) <= sequence:
        raise ValueError(f"{text} must have at least {sequence + 1} bytes, a window, got {len(content)}")
    data = torch.frombuffer(content, dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - sequence, (batch,), generator=generator)
        yield torch.stack([data[start : start + sequence + 1] for start in starts]).to(device)


def loss_of(model: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean cross entropy of the next byte, and the logits `[batch, sequence, 256]`."""
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), logits


def train(
    model: LlamaForCausalLM,
    data: Iterator[Tensor],
    steps: int,
    rate: float,
    after_step: Callable[[float], object],
) -> None:
    """Trains with AdamW at learning rate `rate` for `steps` batches; calls `after_step` with each loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    for _ in range(steps):
        loss, _ = loss_of(model, next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(loss.item())


def continuation(
    model: LlamaForCausalLM, text: Path, device: torch.device, prompt: int = 24, written: int = 64
) -> tuple[str, str]:
    """Returns a prompt from a file, and the model's continuation. Collective.

    Args:
        model: Model of `build`, sharded or not.
        text: File.
        device: Device of the model.
        prompt: Number of bytes of the prompt.
        written: Number of bytes to generate.
    """
    data = text.read_bytes()
    third = data[len(data) // 3 :]
    words = third[third.find(b" ") + 1 :].lstrip() or data
    start = torch.frombuffer(bytearray(words[:prompt]), dtype=torch.uint8)
    torch.manual_seed(0)  # every rank draws the same
    tokens = model.eval().generate(
        start.long().to(device)[None], max_new_tokens=written, do_sample=True, temperature=0.6,
        use_cache=True, pad_token_id=0,
    )  # fmt: skip
    model.train()
    decoded = bytes(tokens[0].tolist()).decode(errors="replace")
    return decoded[: len(start)], decoded[len(start) :]


@dataclass(frozen=True)
class Comparison:
    """Error of the sharded model against the unsharded one in float64.

    Attributes:
        what: Compared values.
        error: Largest difference, relative to the reference's largest magnitude.
        rounding: Error of the unsharded model in the sharded one's dtype: the effect of rounding alone.
    """

    what: str
    error: float
    rounding: float

    @property
    def allowed(self) -> float:
        """Returns the tolerance of `error`."""
        return ALLOWED_FACTOR * self.rounding

    @property
    def holds(self) -> bool:
        """Returns whether `error` is within `allowed` (NaN is not)."""
        return self.error <= self.allowed


def compare(sharded: LlamaForCausalLM, tokens: Tensor) -> list[Comparison]:
    """Compares logits and gradients of the sharded model with the unsharded model's. Collective.

    The reference computes in float64, except where Hugging Face's code converts to float32 (norms, rotary
    angles); all compared models do that.

    Args:
        sharded: Model of `build` after `parallelize`.
        tokens: Batch, the same on every rank.
    """
    weights = full_state_dict(sharded)
    with tokens.device:
        plain = LlamaForCausalLM(sharded.config).to(next(sharded.parameters()).dtype)
    plain.load_state_dict(weights)
    logits, gradients = _evaluate(sharded, tokens)
    plain_logits, plain_gradients = _evaluate(plain, tokens)
    true_logits, true_gradients = _evaluate(plain.double(), tokens)

    def largest(gradients: dict[str, Tensor]) -> float:
        distances = [_distance(gradients[name], reference) for name, reference in true_gradients.items()]
        return torch.tensor(distances, dtype=torch.float64).max().item()  # propagates NaN, unlike max()

    return [
        Comparison("logits", _distance(logits, true_logits), _distance(plain_logits, true_logits)),
        Comparison("gradients", largest(gradients), largest(plain_gradients)),
    ]


def _evaluate(model: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss, logits = loss_of(model, tokens)
    loss.backward()
    gradients = {name: gather_dtensor(parameter.grad) for name, parameter in model.named_parameters()}
    model.zero_grad()
    return logits.detach(), gradients


def _distance(tensor: Tensor, reference: Tensor) -> float:
    return ((tensor.double() - reference).abs().max() / reference.abs().max()).item()
