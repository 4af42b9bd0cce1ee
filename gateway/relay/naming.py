"""Which model a request means, where its prompt is not read or does not say."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from gateway.errors import BadRequest
from gateway.fleet.registry import Registry

_FORM_FIELD_SPAN: Final = 4096
"""Where a multipart form's ``model`` field is looked for: this much of its beginning and of its end."""
_FORM_MODEL: Final = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')


class _Named(msgspec.Struct):
    model: str | None = None


_decode_named = msgspec.json.Decoder(_Named).decode


def named_model(body: bytes) -> str | None:
    """Return the model that a body names, in JSON or in a multipart form, without reading more than it must."""
    if body.startswith(b"--"):
        found = _FORM_MODEL.search(body[:_FORM_FIELD_SPAN]) or _FORM_MODEL.search(body[-_FORM_FIELD_SPAN:])
        return found[1].decode("utf-8", "replace") if found else None
    try:
        return _decode_named(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def only_model(registry: Registry) -> str:
    """Return the model a request means that names none: the only one there is.

    Raises:
        BadRequest: there are more.
    """
    models = {base for worker in registry.workers.values() for base in worker.models.values()}
    if len(models) > 1:
        raise BadRequest("The field 'model' is missing, and more than one model is served here.", param="model")
    return next(iter(models), "")
