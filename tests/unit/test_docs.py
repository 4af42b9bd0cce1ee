"""What operators see is described, and what is described is there."""

import re
from pathlib import Path

import pytest

from gateway.admin.admin import admin_app
from gateway.admin.public import public_app
from gateway.app import Gateway
from gateway.config import Config
from gateway.errors import GatewayError
from tests.processes import ROOT

PAGES = {page: page.read_text("utf-8") for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
TEXT = "\n".join(PAGES.values())


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    """A gateway that is not started, with all that has metrics of its own."""
    sections = {
        "index": {"backend": "redis"},
        "discovery": {"dns": [{"name": "localhost"}]},
        "disaggregation": {"pull_back_s": 1},
        "recorder": {"directory": tmp_path},
    }
    return Gateway(Config.model_validate(sections))


async def test_every_metric_is_described_and_every_one_described_exists(gateway: Gateway) -> None:
    exposed = set(re.findall(r"^# TYPE (kvway_\w+)", gateway.observer.render().decode(), re.MULTILINE))
    described = set(re.findall(r"\bkvway_[a-z_]+[a-z]\b", TEXT))
    assert exposed == described


async def test_every_path_is_described(gateway: Gateway) -> None:
    paths = {**admin_app(gateway).openapi()["paths"], "/ready": {}, "/v1/models": {}}
    assert all(route.path.startswith(tuple(paths)) for route in public_app(gateway).routes)  # type: ignore[attr-defined]
    for path in paths:
        parent, _, name = path.rpartition("/")
        # also as one of several: /admin/cache/{lookup,pin}
        assert re.search(rf"{re.escape(parent)}/(\{{[\w,]*\b)?{name}\b", TEXT), f"no page describes {path}"


def test_every_code_of_an_error_is_described() -> None:
    classes = [GatewayError]
    for each in classes:
        classes += each.__subclasses__()
    assert [each.code for each in classes if each.code and f"`{each.code}`" not in TEXT] == []


def test_links_between_pages_lead_somewhere() -> None:
    for page, text in PAGES.items():
        for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", text):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", there.read_text("utf-8"), re.MULTILINE)
                assert anchor in map(_anchor, headings), f"{page.name}: {target}#{anchor}"


def _anchor(heading: str) -> str:
    """Return what GitHub makes of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
