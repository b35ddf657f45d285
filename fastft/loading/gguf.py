"""A GGUF file as a 16-bit checkpoint folder, made once.

transformers refuses a GGUF together with a bitsandbytes configuration, and a GGUF model it loads itself is marked
quantized and not trainable. So a GGUF is unpacked once into an ordinary checkpoint in the user's cache,

    $HF_HOME/fastft/gguf/<first 32 hex digits of the file's sha256>-bf16/

and from there loaded like any other, in 4 or 16 bits. The folder is written under a temporary name beside its place
and renamed at the end: whatever bears the final name is whole. Two processes that race both do the work; the second
rename finds the folder there and its copy is dropped. bfloat16 because it holds every exponent a float32 can have:
the file's own rounding to 4 to 8 bits is far coarser than bfloat16's.

The tokenizer comes from the same file. Some transformers releases (5.17) read a GGUF's end-of-sequence token wrongly;
the ids in the file's header are the authority here, and a tokenizer that disagrees is corrected, with a warning.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

__all__ = ["cache_root", "dequantized_folder"]

logger = logging.getLogger(__name__)


def cache_root() -> Path:
    """The folder that converted GGUF files are kept in (below Hugging Face's own cache home, `HF_HOME`)."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "fastft" / "gguf"


def dequantized_folder(gguf_path: Path, *, trust_remote_code: bool = False) -> Path:
    """The bfloat16 checkpoint folder of a GGUF file, tokenizer included; made on the first call.

    Raises:
        ImportError: the `gguf` package is not installed.
        ValueError: transformers cannot read this GGUF (architecture, or a damaged file); its error is the cause.
    """
    root = cache_root()
    folder = root / f"{_sha256(gguf_path)[:32]}-bf16"
    if folder.is_dir():
        return folder
    _require_gguf(gguf_path)
    logger.info("fastft: unpacking %s into %s (once)", gguf_path, folder)
    root.mkdir(parents=True, exist_ok=True)
    half_made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
    try:
        _convert(gguf_path, half_made, trust_remote_code)
        _publish(half_made, folder)
    finally:
        shutil.rmtree(half_made, ignore_errors=True)
    return folder


def _publish(half_made: Path, folder: Path) -> None:
    try:
        os.rename(half_made, folder)
    except OSError:
        if not folder.is_dir():  # another failure than "somebody else was first"
            raise


def _convert(gguf_path: Path, target: Path, trust_remote_code: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"gguf_file": gguf_path.name, "trust_remote_code": trust_remote_code}
    try:
        packed = AutoModelForCausalLM.from_pretrained(
            gguf_path.parent,
            dtype=torch.bfloat16,
            device_map={"": "cpu"},
            quantization_config=GgufConfig(dequantize=True),
            **where,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, **where)
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise ValueError(
            f"transformers cannot read {gguf_path}: {error}. Its architecture may not be supported as GGUF, or the "
            "file may be incomplete; the original (safetensors) checkpoint of the same model can be loaded instead."
        ) from error
    _adopt_special_tokens(tokenizer, packed.config, gguf_path)
    _as_plain_model(packed).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _as_plain_model(packed: Any) -> Any:
    """The same weights in a model that does not count as quantized (transformers refuses to save one that does)."""
    config = copy.deepcopy(packed.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(packed).__name__]
    with torch.device("meta"):  # shapes only: every weight is taken over
        plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = packed.generation_config
    return plain


def _adopt_special_tokens(tokenizer: Any, config: Any, gguf_path: Path) -> None:
    for kind in ("bos", "eos"):
        stated = getattr(config, f"{kind}_token_id", None)
        if isinstance(stated, int) and stated != getattr(tokenizer, f"{kind}_token_id"):
            token = tokenizer.convert_ids_to_tokens(stated)
            read_as = getattr(tokenizer, f"{kind}_token")
            logger.warning(
                "fastft: %s: the file's header says the %s token is %r, transformers read %r; saved as the header says",
                gguf_path.name, kind, token, read_as,
            )  # fmt: skip
            setattr(tokenizer, f"{kind}_token", token)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_gguf(gguf_path: Path) -> None:
    if find_spec("gguf") is None:
        raise ImportError(f"Reading {gguf_path.name} needs the gguf package: pip install gguf")
