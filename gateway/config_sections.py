"""What the sections of ``kvway.yaml`` are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator


def _on_disk(path: Path, info: ValidationInfo) -> Path:
    # Only what an operator wrote is held against the disk (`load_config`), not what code builds.
    if info.context is None:
        return path
    try:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
    except OSError as error:
        raise ValueError(f"{path} cannot be reached: {error.strerror}") from None
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name the file itself")
    return path


Seconds = Annotated[float, Field(ge=0)]
MAX_PORT: Final = 65535
Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
WorkerPort = Annotated[int, Field(ge=1, le=MAX_PORT)]
OnDisk = Annotated[Path, AfterValidator(_on_disk)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values do not change after start."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _key_without_value_keeps_its_default(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if value is not None}
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and not {int, float}.isdisjoint((annotation, *get_args(annotation))):
            raise ValueError(f"must be a number, not {str(value).lower()}")
        return value


def has_host_and_port(url: str) -> bool:
    """Return whether a URL names a host that can exist, and a port that can."""
    try:
        parts = urlsplit(url)
        return bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:  # a port that is no number or too large, an unclosed IPv6 bracket, a name that none can have
        return False
