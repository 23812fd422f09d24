"""The chat form that the checkpoint is trained and asked in, and chat turns made out of prose."""

import re

import numpy as np
import tokenizers

from tokens import END_OF_TEXT, IGNORED, IM_END, IM_START, Chapters

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
SENTENCE_END = re.compile(
    r"(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)"  # not after a title
    r"(?:(?<=[.!?])|(?<=[.!?][\"')])) (?=[\"'(]?[A-Z])"
)


def sentences(paragraph: str) -> list[str]:
    """A paragraph's sentences; joined with spaces they are the paragraph again."""
    return SENTENCE_END.split(paragraph)


def chat_sample(chapters: Chapters, weights: np.ndarray, rng: np.random.Generator) -> tuple[str, str]:
    """A passage cut in two: the opening, which the user gives, and what the assistant makes follow."""
    chapter = chapters[rng.choice(len(chapters), p=weights)]
    start = int(rng.integers(len(chapter)))
    first, later = chapter[start], chapter[start + 1 :]
    if rng.random() < 0.3:  # begin inside the paragraph, at a sentence
        parts = sentences(first)
        first = " ".join(parts[int(rng.integers(len(parts))) :])

    kind = rng.random()
    if kind < 0.3:  # one or two whole sentences
        opening = " ".join(sentences(first)[: int(rng.integers(1, 3))])
    else:  # some words
        words = first.split(" ")
        opening = " ".join(words[: int(rng.integers(2, 7) if kind < 0.65 else rng.integers(7, 21))])
    if rng.random() < 0.5:  # people seldom type the comma
        opening = opening.rstrip(",;:-") or opening
    rest = first[len(opening) :]

    # Whole paragraphs while there is room, then whole sentences: the answer ends where the prose pauses.
    room = int(rng.integers(30, 160))
    answer = ""
    for paragraph in [rest, *later]:
        if room <= 0:
            break
        taken = ""
        for sentence in sentences(paragraph):
            if room <= 0 and len(paragraph) - len(taken) > 300:
                break
            taken += (" " if taken else "") + sentence
            room -= sentence.count(" ") + 1
        answer += ("\n\n" if answer.strip() else "") + taken
    return opening, answer.strip()


def chat_text(opening: str, answer: str) -> str:
    """The two turns as CHAT_TEMPLATE writes them."""
    return f"<|im_start|>user\n{opening}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def chat_rows(
    tokenizer: tokenizers.Tokenizer, chapters: Chapters, *, samples: int, length: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Packed chat turns: (inputs, targets), each [rows, length] int32.

    Only what the assistant says, its closing token included, is a target: openings are drawn over and over,
    and their text is trained by the prose half already.
    """
    rng = np.random.default_rng(seed)
    weights = np.array([len(chapter) for chapter in chapters], float)
    weights /= weights.sum()
    pairs = [chat_sample(chapters, weights, rng) for _ in range(samples)]
    texts = [chat_text(opening, answer) for opening, answer in pairs if answer]
    head = 1 + len(tokenizer.encode("assistant\n").ids)

    rows: list[tuple[list[int], list[int]]] = [([], [])]
    for encoding in tokenizer.encode_batch(texts):
        ids = encoding.ids[: length + 1]  # what is cut off a long answer is simply not learnt
        begin = ids.index(IM_START, 1) + head
        # The newline after the closing token is the template's, not the assistant's.
        end = ids.index(IM_END, begin) + 1 if IM_END in ids[begin:] else len(ids)
        target = [token if begin <= i < end else IGNORED for i, token in enumerate(ids)]
        if len(rows[-1][0]) + len(ids) > length + 1:
            rows.append(([], []))
        rows[-1][0].extend(ids)
        rows[-1][1].extend(target)
    tokens = np.full((len(rows), length + 1), END_OF_TEXT, np.int32)
    targets = np.full((len(rows), length + 1), IGNORED, np.int32)
    for i, (ids, target) in enumerate(rows):
        tokens[i, : len(ids)], targets[i, : len(ids)] = ids, target
    return tokens[:, :-1], targets[:, 1:]
