"""The page: one HTML file that loads nothing from a network.

Every text of a model, an environment or a configuration is JSON data inside the page. Its script inserts
them as text, never as HTML. A Content-Security-Policy allows only the page's own scripts and styles, by
their digests. ``strict-dynamic`` lets the script load the files next to the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_peft.files import check_tree, finite, read_bytes, write_atomic
from agent_peft.reports.content import PageContent, read_content
from agent_peft.reports.episodes import chunk
from agent_peft.types import AgentPeftError

if TYPE_CHECKING:
    from agent_peft.policies.tokenization import ChatTokenizer

logger = logging.getLogger(__name__)

MAX_INSIDE = 12 << 20  # bytes of episodes in the page; where there are more, all are in files next to it
SCRIPTS = (  # in their order: the last one starts the page
    *("uPlot.iife.min.js", "elements.js", "curves.js", "tables.js", "tokens.js", "episodes.js"),
    "page.js",
)
_FILE = re.compile(r"r\d+_(step|evaluation)_\d+\.js")


@dataclass(frozen=True)
class Report:
    """What was written: the page, and the folder of the episodes' files if they are not in the page."""

    page: Path
    beside: Path | None
    episodes: int


def write_report(folders: Sequence[Path], out: Path, max_inside: int = MAX_INSIDE) -> Report:
    """Write the report of runs to ``out``. ``max_inside``: bytes of episodes that the page itself may hold.
    Where there are more, they go to the folder ``NAME_episodes`` next to the page, one file for each step,
    and the page loads what is looked at. Nothing that is there already is shown, since a run may come from a
    stranger.
    """
    folder = out.with_name(f"{out.stem}_episodes")
    check_tree(folder)
    content = read_content(folders)
    library = Library(content)
    inside: dict[str, str] = {}
    size = 0
    try:
        for key in content.files:
            inside[key] = library.text(key)
            size += len(inside[key])
            if size > max_inside:
                for earlier, text in inside.items():
                    _write_beside(folder / f"{earlier}.js", script_of(earlier, text))
                inside.clear()
        is_beside = size > max_inside
        content.values["episodes_in"] = folder.name if is_beside else None
        content.values["missing_words"] = library.missing
        write_atomic(out, page(content.values, inside))
        _remove_others(folder, content.files if is_beside else {})
    except OSError as error:
        raise AgentPeftError(
            f"{out}: cannot be written ({error.strerror}); name another with --output"
        ) from error
    episodes = sum(len(run["episodes"]["columns"]["task"]) for run in content.values["runs"])
    return Report(out, folder if is_beside else None, episodes)


class Library:
    """The episodes' files of a report, as JSON texts, with one tokenizer for each run."""

    def __init__(self, content: PageContent) -> None:
        self.content = content
        self.missing: dict[str, str] = {}  # number of a run -> why its tokens are not shown

    def text(self, key: str) -> str:
        """The file ``key``; where it cannot be read, a text with the reason."""
        try:
            return embedded_json(chunk(self.content.files[key], self._of(self.content.run_of(key))))
        except AgentPeftError as error:
            return embedded_json({"words": [], "episodes": [], "fault": str(error)})

    def _of(self, number: int) -> ChatTokenizer | None:
        if str(number) not in self.missing:
            try:
                return _tokenizer_of(json.dumps(self.content.policies[number], default=str))
            except AgentPeftError as error:
                self.missing[str(number)] = str(error)
        return None


@lru_cache(maxsize=8)
def _tokenizer_of(section: str) -> ChatTokenizer:
    """The tokenizer of the model that a run's ``policy`` section (JSON) names. Nothing is downloaded."""
    import transformers

    from agent_peft.policies.loading import policy_config
    from agent_peft.policies.models.bundled import BUNDLED, cached, resolve_model
    from agent_peft.policies.models.start import start_of
    from agent_peft.policies.models.tokenizer import character_tokenizer
    from agent_peft.policies.tokenization import ChatTokenizer

    policy = json.loads(section)
    if not isinstance(policy, dict):
        raise AgentPeftError("the configuration names no model")
    try:
        config = policy_config(policy)
        if config.kind == "scratch":
            return ChatTokenizer(character_tokenizer(config.alphabet))
        name = start_of(config).model
        if name in BUNDLED:
            folder = cached(name)
            if folder is None:
                raise AgentPeftError(f"the model {name!r} is not in the cache")
            place = str(folder)
        else:
            place = resolve_model(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            place, local_files_only=True, trust_remote_code=False
        )
        return ChatTokenizer(tokenizer)
    except AgentPeftError:
        raise
    except Exception as error:  # what a library raises for files that are damaged or absent
        logger.debug("no tokenizer", exc_info=True)
        raise AgentPeftError(
            f"the tokenizer of {policy.get('model')!r} cannot be loaded ({type(error).__name__})"
        ) from error


def embedded_json(value: Any) -> str:
    """JSON that may stand inside HTML and JavaScript: ASCII, and ``<`` escaped, so no text can end a script.

    >>> embedded_json("</script>\\u2028")
    '"\\\\u003c/script>\\\\u2028"'
    """
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a damaged file holds a number that is not finite
        text = json.dumps(finite(value, lambda _: None), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def script_of(key: str, text: str) -> str:
    """A file next to the page: a page opened from a disk may load scripts, and may not fetch."""
    return f"agentPeft.take({embedded_json(key)},{text});\n"


def page(values: Mapping[str, Any] | None, inside: Mapping[str, str]) -> str:
    """The page as HTML, with the episodes' files ``inside`` as JSON texts by key. Without ``values`` it is
    the page of a server, which fetches them.
    """
    styles = _asset("uPlot.min.css") + _asset("report.css")
    scripts = [_asset(name) for name in SCRIPTS]
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_digest, scripts))} 'strict-dynamic'",
            f"style-src {_digest(styles)}",
            f"connect-src {chr(39)}{'self' if values is None else 'none'}{chr(39)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        "<title>Agent-PEFT report</title>",
        f"<style>{styles}</style>",
        "</head>",
        "<body>",
        "<noscript>This report needs JavaScript.</noscript>",
        f'<script type="application/json" id="values">{embedded_json(values)}</script>',
        *(f'<script type="application/json" id="{key}">{text}</script>' for key, text in inside.items()),
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


@lru_cache
def _asset(name: str) -> str:
    return (files("agent_peft.reports") / "static" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _write_beside(path: Path, text: str) -> None:
    """Write a file next to the page, unless the same text is there."""
    with suppress(AgentPeftError):
        if read_bytes(path, "an earlier report", len(text), unlinked=2) == text.encode("ascii"):
            return
    write_atomic(path, text, unlinked=2)


def _remove_others(folder: Path, keys: Container[str]) -> None:
    """Remove what an earlier report left next to the page and this one has not, and nothing else."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if _FILE.fullmatch(path.name) and path.stem not in keys:
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
