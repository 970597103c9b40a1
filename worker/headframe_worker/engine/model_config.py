"""A checkpoint's configuration in Transformers' own class, which is what prepare plans with and what extract builds.

AutoConfig would not always give it: kernel packages (fla, once it is imported) register classes of their own under model
types that Transformers has itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(directory: Path, gguf_file: str | None, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration, whole; for multimodal checkpoints `get_text_config()` is the text model's.

    Code of the model's repository is run with leave only. Raises what Transformers raises for a file that is damaged, or a
    model that it does not know.
    """
    import transformers  # noqa: PLC0415  (seconds to import; only those who need it wait)
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES  # noqa: PLC0415

    options: dict[str, Any] = {"local_files_only": True} | ({"gguf_file": gguf_file} if gguf_file else {})
    values, _ = transformers.PreTrainedConfig.get_config_dict(directory, **options)
    own = CONFIG_MAPPING_NAMES.get(str(values.get("model_type")))
    if own is None or (trust_remote_code and "auto_map" in values):
        found: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, **options
        )
        return found
    config: PreTrainedConfig = getattr(transformers, own).from_dict(values)
    return config
