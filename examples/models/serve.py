"""Serves a model in vLLM with this package's row-parallel linears, and answers one prompt.

    OVERLAP_GEMM_VLLM=1 python examples/models/serve.py --model Qwen/Qwen3-8B --ranks 8

The output of `examples/models/finetune.py` or `lora_on_8_bits.py` is served in the same way.
"""

import argparse

from vllm import LLM, SamplingParams


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--prompt", default="A tile is moved while")
    return parser.parse_args()


def main(options: argparse.Namespace) -> str:
    llm = LLM(options.model, tensor_parallel_size=options.ranks, max_model_len=2048)
    (out,) = llm.generate([options.prompt], SamplingParams(temperature=0.0, max_tokens=32))
    print(out.outputs[0].text)
    return out.outputs[0].text


if __name__ == "__main__":
    main(arguments())
