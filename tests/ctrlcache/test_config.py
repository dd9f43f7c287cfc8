"""Settings: what is wrong is refused by name, what is right arrives."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctrlcache.config import CacheConfig, ColdConfig, HotConfig, WarmConfig
from ctrlcache.errors import ConfigError


def test_strings_become_settings() -> None:
    """A model's parameters, all strings, arrive as numbers, paths and flags."""
    config = CacheConfig.from_mapping(
        {
            "shm_dir": "/dev/shm/run",
            "hot_size_bytes": "512MB",
            "warm_dir": "/data/warm",
            "warm_size_bytes": "1.5GiB",
            "warm_durable": "false",
            "prefetch_buffer_size": "536870912",
            "flush_interval_s": "2.5",
            "trust_policy": "fixed",
            "cold_endpoint": "127.0.0.1:9000",
        }
    )
    assert config.hot == HotConfig(Path("/dev/shm/run/hot"), 512_000_000)
    assert config.warm == WarmConfig(
        Path("/data/warm"), Path("/dev/shm/run/warm-index"), 3 << 29, durable=False
    )
    assert config.prefetch.buffer_size == 512 << 20
    assert (config.flush.interval_s, config.flush.couplets) == (2.5, 128)
    assert config.trust.policy == "fixed"
    assert config.cold.endpoint == "127.0.0.1:9000"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"hot_sizes": "1"}, "hot_sizes.*hot_size_bytes"),
        ({"lukewarm": "1"}, "lukewarm"),
        ({"hot_size_bytes": "much"}, "hot_size_bytes.*512MB.*much"),
        ({"hot_size_bytes": "1"}, "hot size_bytes must be at least"),
        ({"hot_size_bytes": "-5"}, "hot_size_bytes"),
        ({"hot_eviction": "fifo"}, "hot eviction.*lru.*fifo"),
        ({"warm_durable": "perhaps"}, "warm_durable.*true or false.*perhaps"),
        ({"flush_interval_s": "nan"}, "interval_s"),
        ({"flush_interval_s": "soon"}, "flush_interval_s.*float.*soon"),
        ({"flush_couplets": "0"}, "couplets"),
        ({"trust_policy": "blind"}, "policy.*trust, fixed.*blind"),
        ({"cold_endpoint": "https://host"}, "host:port"),
        ({"cold_min_confidence": "2"}, "min_confidence"),
        ({"cold_secret_key": "hush"}, "credentials_file"),
        ({"hot_directory": ""}, "hot_directory"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, str], text: str) -> None:
    """Each error names the setting, what came and what would be right."""
    with pytest.raises(ConfigError, match=text):
        CacheConfig.from_mapping(values)


def test_a_file_has_one_table_per_section(tmp_path: Path) -> None:
    """TOML gives the same settings as strings do."""
    path = tmp_path / "cache.toml"
    path.write_text(
        '[hot]\nsize_bytes = "64MiB"\n[flush]\ninterval_s = 5\n[warm]\ndurable = true\n'
    )
    config = CacheConfig.from_file(path)
    assert config.hot.size_bytes == 64 << 20
    assert config.flush.interval_s == 5.0
    for content, said in (("[hot", "cannot read"), ("[cool]\n", "cool"), ("hot = 3\n", "hot")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=said):
            CacheConfig.from_file(path)
    with pytest.raises(ConfigError, match="cannot read"):
        CacheConfig.from_file(tmp_path / "absent.toml")


def test_credentials_come_from_a_private_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that others can read, or that is no key pair, is refused without showing a secret."""
    path = tmp_path / "keys.json"
    path.write_text('{"access_key": "who", "secret_key": "hush"}')
    path.chmod(0o644)
    config = ColdConfig("host:9000", credentials_file=path)
    with pytest.raises(ConfigError, match="chmod 600"):
        config.credentials()
    path.chmod(0o600)
    assert config.credentials() == ("who", "hush")
    path.write_text('{"secret_key": "hush"}')
    with pytest.raises(ConfigError) as caught:
        config.credentials()
    assert "access_key" in str(caught.value)
    assert "hush" not in str(caught.value)
    monkeypatch.delenv("CTRLCACHE_S3_ACCESS_KEY", raising=False)
    with pytest.raises(ConfigError, match="CTRLCACHE_S3_ACCESS_KEY"):
        ColdConfig("host:9000").credentials()
    monkeypatch.setenv("CTRLCACHE_S3_ACCESS_KEY", "a")
    monkeypatch.setenv("CTRLCACHE_S3_SECRET_KEY", "b")
    assert ColdConfig("host:9000").credentials() == ("a", "b")
