"""What `pptrain train --demo` trains: a small llama, a byte-level tokenizer and a small chat, written to a directory.

The model is random, from a fixed seed, so nothing is downloaded; LoRA on it learns the alphabet in a few dozen steps.
"""

import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.utils import save_config, save_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIALS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPT = "letters from C to H"
"""A question of the data set's kind."""
_ROWS = {"train": 240, "valid": 24, "test": 24}


def write_demo(directory: Path, seed: int = 0) -> None:
    """Write `model/` (as `mlx_lm.load` takes it) and `data/` (train, valid and test.jsonl) below a directory.

    The same seed gives the same bytes. MLX's random state is set by it, as by any run.
    """
    _write_model(directory / "model", seed)
    write_tokenizer(directory / "model")
    _write_data(directory / "data", seed)


def demo_settings(directory: Path) -> dict[str, Any]:
    """Values of `TrainConfig` with which the demo learns within seconds; flags may still change them."""
    return {
        "model": str(directory / "model"),
        "data": str(directory / "data"),
        "adapter_path": str(directory / "adapters"),
        "demo": True,
        "stages": 3,
        "num_layers": -1,
        "batch_size": 4,
        "iters": 50,
        "learning_rate": 1e-3,
        "val_batches": 4,
        "steps_per_eval": 25,
        "steps_per_report": 10,
        "max_seq_length": 64,
        "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 4.0},
    }


def _write_model(directory: Path, seed: int) -> None:
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 256 + len(_SPECIALS),
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 256 + _SPECIALS.index("<|end|>"),
    }
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    # LoRA leaves both as they are: drawn this wide, they let a few steps reach sharp predictions.
    model.model.embed_tokens.weight = model.model.embed_tokens.weight * 4
    model.lm_head.weight = model.lm_head.weight * 4
    save_model(directory, model)
    save_config(config, directory / "config.json")


def write_tokenizer(directory: Path) -> None:
    """One token a byte, numbered by its value, then the special ones."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIALS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=_CHAT_TEMPLATE, model_max_length=512
    ).save_pretrained(directory)


def _byte_vocabulary() -> dict[str, int]:
    """The letters byte-level BPE writes for bytes: printable ones stand for themselves, the others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _write_data(directory: Path, seed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for name, count in _ROWS.items():
        rows = [json.dumps({"messages": _letters(draw)}) for _ in range(count)]
        (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def _letters(draw: random.Random) -> list[dict[str, str]]:
    """A question and its answer: letters from C to H: CDEFGH."""
    count = draw.randrange(3, 9)
    first = ord("A") + draw.randrange(26 - count + 1)
    letters = "".join(map(chr, range(first, first + count)))
    question = f"letters from {letters[0]} to {letters[-1]}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": letters}]
