"""read_config: the configuration file of horovodrun, in YAML."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch_ring.errors import InvalidArgumentError

__all__ = ["read_config"]

# Section -> what goes before its keys in the names of the options.
_SECTIONS = {
    "params": "",
    "autotune": "autotune_",
    "timeline": "timeline_",
    "stall_check": "stall_check_",
    "library_options": "",
    "logging": "log_",
}


def read_config(path: str) -> dict[str, Any]:
    """Return the values of options by their names, such as "cycle_time_ms".

    Raises:
        InvalidArgumentError: PyYAML is missing, or the file, or it has something else.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise InvalidArgumentError(
            "--config-file needs PyYAML: pip install pyyaml, or give the options one by one"
        ) from None
    try:
        text = Path(path).read_text()
        sections = yaml.safe_load(text) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgumentError(f"--config-file {path!r}: {error}") from None
    if not isinstance(sections, dict):
        raise InvalidArgumentError(f"--config-file {path!r}: must have sections, such as `params:`")
    values: dict[str, Any] = {}
    for section, content in sections.items():
        section = str(section).replace("-", "_")
        if section == "verbose":
            values["verbose"] = content
        elif section in _SECTIONS and isinstance(content, dict):
            for key, value in content.items():
                values |= _option(section, str(key).replace("-", "_"), value)
        elif section != "controller":  # there is one only
            raise InvalidArgumentError(
                f"--config-file {path!r}: {section!r} is not a section (they are "
                f"{', '.join(_SECTIONS)})"
            )
    return {name: value for name, value in values.items() if value is not None}


def _option(section: str, key: str, value: Any) -> dict[str, Any]:
    if key == "enabled":
        is_stall_check = section == "stall_check"
        return {"no_stall_check" if is_stall_check else section: value != is_stall_check}
    return {_SECTIONS[section] + key: value}
