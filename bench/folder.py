"""The files of a checkpoint's folder, in Hugging Face's layout."""

import json
from pathlib import Path

import jax.numpy as jnp
import tokenizers

import jaxfuse
from chat import CHAT_TEMPLATE, SAMPLING
from tokens import END_OF_TEXT, IM_END, SPECIAL, THOUGHT, Chapters, plain

EXCERPT_BYTES = 16_000


def excerpt(chapters: Chapters) -> str:
    """The beginning of the longest held-out chapter: the paragraphs that fit in EXCERPT_BYTES."""
    text = ""
    for paragraph in max(chapters, key=lambda chapter: len(plain(chapter))):
        longer = f"{text}\n\n{paragraph}" if text else paragraph
        if len(longer.encode()) > EXCERPT_BYTES:
            break
        text = longer
    return text


def write_folder(folder: Path, model: jaxfuse.Qwen3, tokenizer: tokenizers.Tokenizer, heldout: Chapters) -> None:
    """Everything of a checkpoint but training.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(folder), dtype=jnp.bfloat16)
    tokenizer.save(str(folder / "tokenizer.json"))
    plainly = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(END_OF_TEXT + i): {"content": token, **plainly, "special": token in SPECIAL}
        for i, token in enumerate(SPECIAL + THOUGHT)
    }
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": 2048,
            "pad_token": "<|endoftext|>",
            "unk_token": None,
        },
        "generation_config.json": {
            "do_sample": True,
            "eos_token_id": [IM_END, END_OF_TEXT],
            "pad_token_id": END_OF_TEXT,
            **SAMPLING,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    (folder / "heldout_excerpt.txt").write_text(excerpt(heldout), "utf-8")
