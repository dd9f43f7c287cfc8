"""The exception tree. A miss is None, corruption is counted and becomes a miss; only these raise.

CtrlCacheError
├── ConfigError        a setting is missing, malformed or contradicts another (also ValueError)
├── InvalidInput       a caller's argument is wrong (also ValueError)
├── CalibrationError   calibration is absent, unreadable or belongs to other weights
├── CorruptRecord      stored bytes fail their checksum or layout; tiers turn it into a miss
└── TierUnavailable    a tier cannot serve right now (full, read-only, gone); callers go on
"""

from __future__ import annotations

__all__ = [
    "CalibrationError",
    "ConfigError",
    "CorruptRecord",
    "CtrlCacheError",
    "InvalidInput",
    "TierUnavailable",
]


class CtrlCacheError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(CtrlCacheError, ValueError):
    """A setting is missing, malformed or contradicts another."""


class InvalidInput(CtrlCacheError, ValueError):
    """A caller's argument is wrong; the text names it, what was expected and what came."""


class CalibrationError(CtrlCacheError):
    """Calibration is absent, unreadable or belongs to other weights."""


class CorruptRecord(CtrlCacheError):
    """Stored bytes fail their checksum or layout."""


class TierUnavailable(CtrlCacheError):
    """A tier cannot serve right now; the service goes on without it."""
