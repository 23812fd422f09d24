"""Fetch and clean the prose that the shipped checkpoint is trained on.

    python3 bench/corpus.py --out DIR
    python3 bench/corpus.py --out DIR --text a.txt b.txt     # your own UTF-8 texts, on any system

The text is Jane Austen's six novels as Debian's package r-cran-janeaustenr 1.0.0-1 carries them: the package
is under the MIT license, the novels (Project Gutenberg numbers 158, 141, 121, 105, 1342 and 161) are in the
public domain. Fetching needs Debian or a system like it, with apt-get and dpkg-deb; R is not needed.

DIR gets train.txt, valid.txt and heldout.txt: one paragraph a line, an empty line between chapters. Of every
book the chapter a third of the way in goes to valid.txt (training stops by it), the one two thirds in to
heldout.txt (reported, never looked at before), the rest to train.txt. sources.json says where each book came
from.
"""

import argparse
import gzip
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "r-cran-janeaustenr", "1.0.0-1"
BOOKS = {
    "emma": "Emma (1815), Project Gutenberg 158",
    "mansfieldpark": "Mansfield Park (1814), Project Gutenberg 141",
    "northangerabbey": "Northanger Abbey (1817), Project Gutenberg 121",
    "persuasion": "Persuasion (1817), Project Gutenberg 105",
    "prideprejudice": "Pride and Prejudice (1813), Project Gutenberg 1342",
    "sensesensibility": "Sense and Sensibility (1811), Project Gutenberg 161",
}
HEADING = re.compile(r"^\s*chapter\s+([ivxlc]+|\d+)\.?\s*$", re.IGNORECASE | re.MULTILINE)
# Where a book's own text ends; what follows is the printer's or a later editor's.
END = re.compile(r"^\s*(the end|finis|a note on the text)\s*$", re.IGNORECASE | re.MULTILINE)
VOLUME = re.compile(r"^\s*volume\s+([ivxlc]+|\d+)\.?\s*$", re.IGNORECASE | re.MULTILINE)
ASCII = str.maketrans(  # single and double quotes, dashes, the ellipsis, the fixed space
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "--",
        "\u2014": "--",
        "\u2026": "...",
        "\u00a0": " ",
    }
)
PIECE = 40  # paragraphs to a piece, for a text that has no chapter headings


class RData:
    """Reads the few types of R's XDR serialization (versions 2 and 3) that a list of strings needs."""

    def __init__(self, data: bytes) -> None:
        if data[:2] != b"X\n":
            raise ValueError(f"an R object in XDR form starts with b'X\\n', not {data[:2]!r}")
        self.data, self.at, self.symbols = data, 2, [None]
        version, _, _ = self._ints(3)
        if version == 3:
            (length,) = self._ints(1)  # the name of the encoding
            self.at += length

    def _ints(self, count: int) -> tuple[int, ...]:
        self.at += 4 * count
        return struct.unpack_from(f">{count}i", self.data, self.at - 4 * count)

    def read(self) -> Any:
        """The next object: str, list, dict (a list with names) or None."""
        (flags,) = self._ints(1)
        kind = flags & 255
        if kind == 254:  # NULL
            return None
        if kind == 255:  # a symbol seen before
            return self.symbols[flags >> 8]
        if kind == 1:  # a new symbol
            self.symbols.append(self.read())
            return self.symbols[-1]
        if kind == 9:  # a string
            (length,) = self._ints(1)
            self.at += max(length, 0)
            return None if length < 0 else self.data[self.at - length : self.at].decode("utf-8")
        if kind == 2:  # one link of a list of attributes; the next follows
            tag = self.read() if flags & 0x400 else None
            value = self.read()
            return {tag: value, **(self.read() or {})}
        (length,) = self._ints(1)
        if kind in (10, 13):  # logical, integer
            values: list[Any] = list(self._ints(length))
        elif kind in (16, 19):  # strings, list
            values = [self.read() for _ in range(length)]
        else:
            raise ValueError(f"R type {kind} is not one that a list of strings needs")
        attributes = self.read() if flags & 0x200 else None
        return dict(zip(attributes["names"], values, strict=True)) if attributes else values


def fetch() -> dict[str, str]:
    """The six novels, by name, out of the Debian package. Raises RuntimeError where that cannot be had."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"fetching {PACKAGE} needs Debian's {tool}; elsewhere use --text")
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"{PACKAGE}={VERSION}"
        done = subprocess.run(["apt-get", "download", wanted], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"apt-get download {wanted} failed (run apt-get update?): {done.stderr.strip()}")
        (package,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), folder], check=True)
        data = Path(folder, "usr/lib/R/site-library/janeaustenr/data")
        where = RData(gzip.decompress((data / "Rdata.rdx").read_bytes())).read()["variables"]
        store = (data / "Rdata.rdb").read_bytes()
    # An entry of the store is its length when unpacked (4 bytes), then a zlib stream.
    return {
        name: "\n".join(RData(zlib.decompress(store[start + 4 : start + length])).read())
        for name, (start, length) in where.items()
    }


def paragraphs(text: str) -> Iterator[str]:
    """The prose paragraphs of a hard-wrapped text, one line each; verse and ornaments are left out."""
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.split("\n") if line.strip()]
        if not lines or all(re.match(r" {4,}", line) for line in lines):
            continue
        # A dash or a hyphen at the end of a line joins it to the next without a space.
        joined = "\n".join(line.strip() for line in lines).replace("-\n", "-")
        joined = re.sub(r"\s+", " ", joined.replace("_", ""))
        if re.match(r"[\[*]", joined) or not re.search(r"[a-z]", joined):
            continue
        yield joined.replace("*", "")


def chapters(text: str) -> list[list[str]]:
    """The chapters of a book as lists of paragraphs; pieces of 40 paragraphs where there are no headings."""
    text = VOLUME.sub("", text.replace("\r\n", "\n").translate(ASCII))
    end = END.search(text)
    text = text[: end.start()] if end else text
    if HEADING.search(text):
        pieces = HEADING.split(text)[2::2]  # before the first heading: title page; between: the numerals
        return [chapter for chapter in (list(paragraphs(piece)) for piece in pieces) if chapter]
    whole = list(paragraphs(text))
    return [whole[i : i + PIECE] for i in range(0, len(whole), PIECE)]


def main() -> None:
    """The command."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--text", type=Path, nargs="+", help="texts of your own instead of the novels")
    args = parser.parse_args()
    try:
        books = {str(path): path.read_text("utf-8") for path in args.text} if args.text else fetch()
    except (RuntimeError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"corpus.py: {error}")

    parts: dict[str, list[list[str]]] = {"train": [], "valid": [], "heldout": []}
    for name, text in books.items():
        book = chapters(text)
        if len(book) < 3:
            sys.exit(f"corpus.py: a text needs 3 chapters or {3 * PIECE} paragraphs at least; {name} is shorter")
        aside = {len(book) // 3: "valid", 2 * len(book) // 3: "heldout"}
        for i, chapter in enumerate(book):
            parts[aside.get(i, "train")].append(chapter)

    args.out.mkdir(parents=True, exist_ok=True)
    for part, kept in parts.items():
        text = "\n\n".join("\n".join(chapter) for chapter in kept) + "\n"
        (args.out / f"{part}.txt").write_text(text, "utf-8")
        print(f"{part}: {len(kept)} chapters, {sum(map(len, kept))} paragraphs, {len(text.encode())} bytes")
    sources: dict[str, Any] = {"texts": list(books)}
    if not args.text:
        license = "the package: MIT; the novels: public domain"
        sources = {"package": f"Debian {PACKAGE} {VERSION}", "license": license, "texts": BOOKS}
    (args.out / "sources.json").write_text(json.dumps(sources, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
