"""Renders a stranger's chat template in a separate process that may be killed; ``pretrained`` starts it.

A template is a program. Jinja's sandbox keeps it from files and processes, but not from looping or from
filling the memory.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TOO_MUCH = 3  # exit code


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 (Jinja's own way of subclassing)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def sandbox() -> ImmutableSandboxedEnvironment:
    """Jinja as Transformers sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def render_all(
    template: str, special_tokens: dict[str, str], conversations: list[list[dict[str, str]]], longest: int
) -> None:
    """Render every conversation, with and without a generation prompt. Failures are reported later, when the
    policy's process renders the same.

    Raises:
        MemoryError: there is not enough, or a text is longer than ``longest`` characters.
    """
    environment = sandbox()
    for conversation in conversations:
        for generate in (True, False):
            try:
                compiled = environment.from_string(template)
                values: dict[str, Any] = {
                    **special_tokens,
                    "add_generation_prompt": generate,
                    "tools": None,
                    "documents": None,
                }
                length = 0
                for part in compiled.generate(messages=conversation, **values):
                    length += len(part)
                    if length > longest:
                        raise MemoryError
            except MemoryError:
                raise
            except Exception:  # a template may refuse some conversations, and does so in any way it likes
                continue


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (request["bytes"], request["bytes"]))
    resource.setrlimit(resource.RLIMIT_CPU, (request["seconds"], request["seconds"] + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        render_all(
            request["template"], request["special_tokens"], request["conversations"], request["longest"]
        )
    except MemoryError:
        sys.exit(TOO_MUCH)
