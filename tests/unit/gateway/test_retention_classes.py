"""Retention classes and profiles in the configuration."""

from __future__ import annotations

import pytest

from gateway.dialects.families import cache_profile
from gateway.retention_classes import CacheProfile, CachingConfig, RetentionClass
from tenancy.errors import BadPrice
from tenancy.pricing.charges import RateCard


def test_hosted_apis_retention_classes_are_built_in() -> None:
    """An SDK's TTLs work without any configuration."""
    config = CachingConfig()
    found = {name: config.retention(name) for name in ("5m", "1h", "30m", "12h", "24h")}

    assert [terms and terms.promise_s for terms in found.values()] == [300, 3600, 1800, 43200, 0]
    assert config.retention("9d") is None


def test_configuration_adds_classes_and_replaces_profiles() -> None:
    config = CachingConfig(
        classes={"9d": RetentionClass(777_600)}, profiles={"openai": CacheProfile(granularity=128)}
    )
    found = config.retention("9d")

    assert found is not None
    assert (found.name, found.promise_s, found.limit_s) == ("9d", 777_600, None)
    assert cache_profile(config, "openai").granularity == 128
    assert cache_profile(config, "anthropic").lookup == "written"


def test_refuses_prices_for_unknown_classes() -> None:
    """Configured classes exist, and so do classes that no client names."""
    config = CachingConfig(classes={"9d": RetentionClass(777_600)})
    config.check_card(
        RateCard(
            "x",
            cache_write={"5m": 1, "9d": 2, "resource": 3, "*": 4},
            storage={"1h": 1, "resource": 2, "best_effort": 3, "*": 4},
        )
    )

    with pytest.raises(BadPrice, match="unknown retention class '8d'"):
        config.check_card(RateCard("x", cache_write={"8d": 1}))
