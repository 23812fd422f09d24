"""Between text and token ids: the checkpoint's tokenizer and its chat template."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from jaxfuse.errors import CheckpointError, InputError


class Tokenizer:
    """A checkpoint's tokenizer, loaded by transformers.

    Raises:
        CheckpointError: when the folder has none, or it cannot be read.
    """

    def __init__(self, folder: Path):
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is not needed here
        from transformers import AutoTokenizer  # imported here: it takes seconds

        if not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; add the checkpoint's tokenizer, or give token ids with --tokens"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"cannot read the tokenizer of {folder} ({first_line}); download it again") from error

    def encode(self, prompt: str, *, raw: bool) -> list[int]:
        """Token ids of a user's turn in the chat template; with `raw`, or without a template, of the text alone.

        Raises:
            InputError: for text that is not Unicode.
            CheckpointError: when the chat template fails.
        """
        try:
            prompt.encode()
        except UnicodeEncodeError:  # Python's half surrogates, for bytes of a command line that are not UTF-8
            raise InputError(f"a prompt must be Unicode text, got {prompt!r}; give it in UTF-8") from None
        if not raw and self._tokenizer.chat_template:
            prompt = self._templated(prompt)
        # Not verbose: that a prompt is long for the tokenizer says nothing about the model.
        return list(self._tokenizer.encode(prompt, add_special_tokens=False, verbose=False))

    def _templated(self, prompt: str) -> str:
        turns = [{"role": "user", "content": prompt}]
        try:
            # As text: the ids' container differs between releases of transformers.
            return str(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # the template is a program of the checkpoint's
            raise CheckpointError(f"the chat template fails ({error}); give the prompt as it is, with --raw") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def streamer(self) -> "TextStream":
        """Turns tokens into text as they come."""
        return TextStream(self)


class TextStream:
    """Text of a growing list of tokens, handed out in whole characters."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._text = ""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        new = ""
        for token in tokens:
            self._tokens.append(token)
            new += self._stream.step(self._tokenizer._tokenizer.backend_tokenizer, token) or ""
        self._text += new
        return new

    def flush(self) -> str:
        """What is left at the end: a character that never became whole."""
        whole = self._tokenizer.decode(self._tokens)
        return whole[len(self._text) :] if whole.startswith(self._text) else ""
