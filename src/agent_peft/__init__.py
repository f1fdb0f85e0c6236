"""Agent-PEFT teaches language-model agents by letting them act.

``__init__.pyi`` lists the public names. Each is imported when it is first used, so that
``import agent_peft`` is fast and loads neither torch nor Transformers.

>>> import agent_peft as ap
>>> ap.load_environment("arithmetic", digits=1).tasks[0].skills
('addition',)
"""

from importlib import import_module as _import_module

_HOMES = {}  # name -> module
with open(__file__.removesuffix(".py") + ".pyi", encoding="utf-8") as _file:
    for _words in map(str.split, _file):
        if _words[:1] == ["from"]:
            _HOMES[_words[-1]] = _words[1]

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    value = _import_module(f"{home}.{name}") if home == __name__ else getattr(_import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
