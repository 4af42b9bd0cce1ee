"""Policies of other packages: the documented example as a package of its own, and packages that are broken."""

import re
import sys
import tomllib
from collections.abc import Callable

import pytest

from gateway.config import Config
from policies.base import PolicyError, create_policy, known_policies
from tests.fleets import make_fleet, make_request, make_residency
from tests.processes import ROOT

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path, monkeypatch) -> Install:
    """Install a package of one module that publishes policies."""

    def install(code: str, points: str) -> None:
        (tmp_path / "my_package.py").write_text(code)
        metadata = tmp_path / "my_package-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[kvway.policies]\n{points}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "my_package", raising=False)

    return install


def example() -> tuple[str, str]:
    """Return the documented policy's code, and how it is published."""
    page = (ROOT / "docs" / "policies.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    published = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert code is not None
    assert published is not None
    points = tomllib.loads(published[1])["project"]["entry-points"]["kvway.policies"]
    return code[1], "\n".join(f"{name} = {where}" for name, where in points.items())


def test_the_documented_example_is_a_policy_like_any_other(install):
    install(*example())
    assert "sticky-first" in known_policies()
    fleet = make_fleet(3, pending_prefill_tokens=[0, 300, 0])
    policy = create_policy("sticky-first")
    decision = policy.decide(make_request(1000), fleet, make_residency([0, 512, 256]), now=0.0)
    assert (decision.worker, decision.expected_hit_tokens, decision.fallbacks) == (2, 256, [1, 0])
    heavier = create_policy("sticky-first", {"hit_weight": 2})
    assert heavier.decide(make_request(1000), fleet, make_residency([0, 512, 256]), now=0.0).worker == 1


def test_the_documented_example_is_short():
    assert len(example()[0].splitlines()) <= 30


def test_a_packages_policy_can_be_configured_and_its_parameters_are_checked(install):
    install(*example())
    config = Config.model_validate({"models": {"llama": {"policy": {"name": "sticky-first"}}}})
    assert config.models["llama"].policy is not None
    with pytest.raises(PolicyError, match="'sticky-first': unknown parameter 'weight'; did you mean 'hit_weight'"):
        create_policy("sticky-first", {"weight": 2})


def test_a_packages_policy_cannot_replace_one_of_kvway(install):
    install(example()[0], "random = my_package:StickyFirst")
    assert known_policies()["random"].__module__ == "policies.random_choice"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nowhere_to_be_found", "cannot be loaded from my_package:Mine: No module named 'nowhere_to_be_found'"),
        ("class Other: pass", "cannot be loaded from my_package:Mine: .*no attribute 'Mine'"),
        ("class Mine: pass", "my_package:Mine is no policy: 'mine' needs name, Params"),
        (
            "from policies.base import NoParams\nclass Mine:\n    Params = NoParams\n    def decide(self): pass",
            "my_package:Mine is no policy: 'mine' needs name, Params",
        ),
    ],
)
def test_a_broken_package_is_named_and_leaves_other_policies_alone(install, code, message):
    install(code, "mine = my_package:Mine")
    assert "mine" not in known_policies()
    assert create_policy("least-work").name == "least-work"
    with pytest.raises(PolicyError, match=message):
        create_policy("mine")


def test_parameters_that_a_packages_policy_refuses_are_a_mistake_in_the_configuration(install):
    code, points = example()
    install(code.replace("self._weight =", "self._weight = 1 /"), points)
    with pytest.raises(PolicyError, match="policy 'sticky-first' refuses its parameters: float division by zero"):
        create_policy("sticky-first", {"hit_weight": 0})
