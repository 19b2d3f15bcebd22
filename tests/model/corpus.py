"""The text the model learns: Python's standard library and Debian's manual pages."""

from __future__ import annotations

import gzip
import hashlib
import random
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

CLASSES = ("code", "english", "german", "japanese")
MAN_ROOT = Path("/usr/share/man")
PACKAGES = {
    "english": ("manpages", "man"),
    "german": ("manpages-de", "de/man"),
    "japanese": ("manpages-ja", "ja/man"),
}
SKIPPED_FOLDERS = {"encodings", "lib2to3", "pydoc_data", "site-packages", "test"}
MIN_CHARS = 1200
MAX_CHARS = {"code": 5_000_000, "english": 3_000_000, "german": 4_000_000, "japanese": 3_000_000}
TRANSCRIPT_SHARE = 0.10
HELDOUT_SHARE = 0.08

EMAIL = re.compile(r"[<(]?[\w.+-]+@[\w-]+\.[\w.-]+[>)]?")
DROPPED_SECTION = re.compile(
    r"AUTHOR|AUTOR|ÜBERSETZUNG|COPYRIGHT|COLOPHON|KOLOPHON|MELDEN|REPORTING|翻訳|著者|作者|この文書"
)
GLYPHS = {"aq": "'", "dq": '"', "lq": '"', "rq": '"', "oq": "'", "cq": "'", "en": "-", "em": "-"}
GLYPHS |= {"bu": "*", "co": "(c)", "rs": "\\", "ha": "^", "ti": "~", "la": "<", "ra": ">"}


@dataclass(frozen=True)
class Corpus:
    """The documents of one class, split so that no document is in two parts."""

    train: list[str]
    transcripts: list[str]
    heldout: list[str]
    sha256: str

    def part(self, name: str) -> list[str]:
        return {"train": self.train, "transcripts": self.transcripts, "heldout": self.heldout}[name]


def _glyph(match: re.Match[str]) -> str:
    return GLYPHS.get(match.group(1) or match.group(2), "")


def _inline(text: str) -> str:
    """One line of roff without its escapes."""
    text = re.sub(r'\\["#].*$', "", text)
    text = re.sub(r"\\f(?:\[[^]]*\]|\(..|.)|\\s[-+]?\d|\\m\[[^]]*\]", "", text)
    text = re.sub(r"\\\((..)|\\\[([^]]*)\]", _glyph, text)
    text = text.replace("\\-", "-").replace("\\e", "\x00").replace("\\ ", " ").replace("\\~", " ")
    text = re.sub(r"\\\*(?:\(..|\[[^]]*\]|.)|\\[hvwz]'[^']*'|\\.?", "", text)
    return text.replace("\x00", "\\")


def _macro(name: str, rest: str) -> str | None:
    """What one macro line contributes to the text; None for nothing."""
    words: list[str] = [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', rest)]
    if name in {"B", "I", "SB", "SM", "Nm", "Fl", "Ar", "Pa", "Em", "Sy", "Li", "Cm"}:
        return " ".join(words)
    if name in {"BR", "RB", "BI", "IB", "IR", "RI", "Xr"}:
        return "".join(words)
    if name in {"SH", "SS", "Sh", "Ss"}:
        return "\n" + " ".join(words)
    if name in {"IP", "It"} and words:
        return "\n" + words[0]
    if name in {"PP", "P", "LP", "TP", "Pp", "HP", "IP"}:
        return "\n"
    return None


def plain_text(roff: str) -> str:
    """The readable text of a manual page, without the sections that name people."""
    out: list[str] = []
    dropping = False
    for line in roff.splitlines():
        macro = re.match(r"[.'][ \t]*([A-Za-z]{1,3})(?:[ \t]+(.*))?$", line)
        if macro and macro.group(1) in {"SH", "Sh"}:
            dropping = bool(DROPPED_SECTION.search(macro.group(2) or ""))
        if dropping or (not macro and line[:1] in {".", "'"}):
            continue
        text = _macro(macro.group(1), macro.group(2) or "") if macro else line
        if text is not None:
            out.append(_inline(text).rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def _manual_pages(package: str, folder: str) -> list[Path]:
    listed = subprocess.run(["dpkg", "-L", package], check=True, capture_output=True, text=True)
    prefix = str(MAN_ROOT / folder)
    return [Path(p) for p in listed.stdout.split() if p.startswith(prefix) and p.endswith(".gz")]


def _read_page(path: Path) -> str:
    if not path.is_file():
        return ""
    with gzip.open(path, "rt", encoding="utf-8", errors="ignore") as file:
        return plain_text(file.read())


def _modules() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [*root.glob("*.py"), *root.glob("[a-z]*/*.py")]
    return [p for p in found if p.relative_to(root).parts[0] not in SKIPPED_FOLDERS]


def _read_module(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def _documents(
    paths: Iterable[Path], read: Callable[[Path], str], cls: str, seed: int
) -> list[str]:
    ordered = sorted(paths)
    random.Random(f"{seed}/{cls}").shuffle(ordered)
    seen: set[str] = set()
    out: list[str] = []
    total = 0
    for path in ordered:
        text = EMAIL.sub("", read(path)).strip()
        head = text[:400]
        if len(text) < MIN_CHARS or head in seen:
            continue
        seen.add(head)
        out.append(text)
        total += len(text)
        if total > MAX_CHARS[cls]:
            break
    return out


def load(cls: str, seed: int = 0) -> Corpus:
    """The documents of `cls`; their order depends on the seed and the installed packages only."""
    if cls == "code":
        documents = _documents(_modules(), _read_module, cls, seed)
    else:
        documents = _documents(_manual_pages(*PACKAGES[cls]), _read_page, cls, seed)
    first = int(len(documents) * TRANSCRIPT_SHARE)
    second = first + int(len(documents) * HELDOUT_SHARE)
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return Corpus(documents[second:], documents[:first], documents[first:second], digest)


@dataclass(frozen=True)
class Turn:
    """A few lines of a document and the lines that follow them."""

    user: str
    assistant: str


def _take(lines: list[str], at: int, low: int, high: int, rng: random.Random) -> tuple[str, int]:
    """Lines from `at` on with about `low` to `high` characters, and where they end."""
    want = rng.randint(low, high)
    start = at
    size = 0
    while at < len(lines) and size < want:
        size += len(lines[at]) + 1
        at += 1
    return "\n".join(lines[start:at])[: 2 * high].strip("\n"), at


def turns(document: str, rng: random.Random, most: int = 3, scale: float = 1.0) -> list[Turn]:
    """A conversation cut out of a document: the user gives lines, the assistant goes on."""
    lines = document.split("\n")
    at = 0 if rng.random() < 0.3 else rng.randrange(max(1, len(lines) - 20))
    out: list[Turn] = []
    for number in range(rng.randint(1, most)):
        low, high = (80, 500) if number == 0 else (30, 200)
        user, at = _take(lines, at, int(low * scale), int(high * scale), rng)
        assistant, at = _take(lines, at, int(60 * scale), int(900 * scale), rng)
        if not user.strip() or not assistant.strip():
            break
        out.append(Turn(user, assistant))
    return out


def messages(conversation: list[Turn]) -> list[dict[str, str]]:
    out: list[dict[str, str]] = []
    for turn in conversation:
        out.append({"role": "user", "content": turn.user})
        out.append({"role": "assistant", "content": turn.assistant})
    return out
